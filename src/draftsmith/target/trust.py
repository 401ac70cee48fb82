"""What of a model's folder may be read: safetensors and JSON inside it. Never a pickle, no code unless asked for."""

import json
from pathlib import Path

from draftsmith.errors import InputError
from draftsmith.files import is_inside

_PICKLES = ("*.bin", "*.pt", "*.pth", "*.ckpt", "*.bin.index.json")


def check_folder(folder: Path, setting: str) -> None:
    """A folder that holds safetensors, whose index names files inside it only. One that is not there passes.

    Args:
        setting: what the user calls the folder, e.g. `target.adapter 'x'`.

    Raises:
        InputError: its weights are a pickle, or its index names files elsewhere.
    """
    pickles = sorted(path.name for pattern in _PICKLES for path in folder.glob(pattern))
    if pickles and not any(folder.glob("*.safetensors")):
        raise InputError(
            f"{setting}: its weights are in {pickles[0]}, a pickle, which can run any code when it is read; save them "
            "as safetensors (in transformers and peft: save_pretrained) where you trust them, or get such a copy"
        )
    for index in sorted(folder.glob("*.index.json")):
        try:
            names = json.loads(index.read_text(encoding="utf-8"))["weight_map"].values()
            outside = next((name for name in names if not is_inside(name)), None)
        except (OSError, ValueError, LookupError, TypeError, AttributeError, RecursionError) as error:
            raise InputError(f"{setting}: {index} cannot be read: {error}; copy it again") from None
        if outside is not None:
            raise InputError(f"{setting}: {index} names {outside!r}, which is not inside its folder; get another copy")


def explained_refusal(model: str, error: BaseException) -> str:
    """What a person is told when transformers refuses a model."""
    said = " ".join(str(error).split())
    if "trust_remote_code" in said:
        return (
            f"target.model {model!r} brings code of its own, which is not run unless you ask for it: read the code, "
            "then set target.trust_remote_code to true"
        )
    if "safetensors" in said and "does not appear to have a file" in said:
        return (
            f"target.model {model!r} has no safetensors on the hub, and a pickle (pytorch_model.bin) can run any code "
            "when it is read; convert a copy that you trust, and give its folder"
        )
    return f"target.model {model!r} cannot be loaded: {said[:300] or type(error).__name__}"
