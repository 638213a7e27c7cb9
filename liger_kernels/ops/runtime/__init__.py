"""What every op needs around its kernels: where it runs, how it is launched, compiled and tiled, what it accepts."""
