"""The proof: trains patched and unpatched mini models and decides whether a patch is still the same mathematics."""
