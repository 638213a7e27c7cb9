"""torch.compile hands Python numbers to a kernel as float64; a kernel that computes with them as they come runs at a
fraction of its speed, with the right result. Compiled for a GPU that need not be there, by the cases of
``test_ops_compile``."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any


def compile_with_wide_scalars() -> None:
    """In the subprocess: print what ``compile_all`` finds, with every number of a launch typed as Inductor types it,
    and compiled no further than to what is looked at."""
    import triton

    from tests import test_ops_compile

    backend = triton.backends.backends["nvidia"].compiler
    add_stages = backend.add_stages

    def only_ttir(self: Any, stages: dict[str, Any], *rest: Any) -> None:
        add_stages(self, stages, *rest)
        ttir = stages["ttir"]
        stages.update(dict.fromkeys(stages, lambda module, metadata: metadata.update(name="", shared=0) or b""))
        stages["ttir"] = ttir

    backend.add_stages = only_ttir

    signature_of = test_ops_compile.signature_of

    def widened(*args: Any) -> tuple[dict, dict, dict, dict]:
        signature, *rest = signature_of(*args)
        return {name: "fp64" if kind == "fp32" else kind for name, kind in signature.items()}, *rest

    test_ops_compile.signature_of = widened
    names = ["rms_norm", "cross_entropy", "linear_cross_entropy"]
    found = test_ops_compile.compile_all(names, ["sm_90"])  # the target whose operations are kept
    json.dump([record for name in names for record in found[name]], sys.stdout)


def wide_operations(ttir: str) -> list[str]:
    """The operations in float64 but for those that round to float32."""
    lines = [line.split(" loc(")[0].strip() for line in ttir.splitlines()]
    return [x for x in lines if "f64" in x and "arith.truncf" not in x and not x.startswith(("tt.func", "#loc"))]


def test_numbers_are_rounded_before_anything_else(tmp_path: Path) -> None:
    env = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    root = Path(__file__).parent.parent
    env |= {"TRITON_CACHE_DIR": str(tmp_path), "PYTHONPATH": str(root)}
    done = subprocess.run([sys.executable, __file__], env=env, cwd=root, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-5000:]
    compiled = [record for record in json.loads(done.stdout) if record["ttir"]]
    assert any("f64" in record["ttir"] for record in compiled)
    for record in compiled:
        assert not wide_operations(record["ttir"]), f"{record['what']}: {wide_operations(record['ttir'])[:3]}"


if __name__ == "__main__":
    compile_with_wide_scalars()
