"""How far our logits are from those of `transformers`, for every supported variant, imported and exported, in fp32.

    python -m benchmarks.agreement [--json]

The models are tiny and every weight is random, so that a swapped or unread tensor shows. Relative error: largest
difference over the largest logit.
"""

import argparse
import json
import tempfile
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from meshwright.formats.hub import export_folder, import_folder
from meshwright.model import Transformer, build
from tests.formats.hub.peers import PEERS, peer, relative_error, shake, tensors_of, tokens


def imported_error(name: str, folder: Path) -> float:
    """A directory written by transformers, loaded here."""
    theirs = peer(name)
    theirs.save_pretrained(folder)
    return relative_error(loaded(folder)(tokens()), theirs(tokens()).logits)


def exported_error(name: str, folder: Path) -> float:
    """A directory written here, loaded by transformers. The shape is that of the peer, the weights are new."""
    import transformers

    peer(name).save_pretrained(folder / "theirs")
    ours = build(import_folder(folder / "theirs").shape).eval()
    shake(tensors_of(ours), seed=7)
    tensors = tensors_of(ours).items()
    export_folder(folder / "ours", model_tensors=tensors, shape=ours.shape, tokenizer=None, dtype=torch.float32)
    back = transformers.AutoModelForCausalLM.from_pretrained(folder / "ours").eval()
    return relative_error(ours(tokens()), back(tokens()).logits)


def loaded(folder: Path) -> Transformer:
    """Our model with the weights of a directory."""
    run = import_folder(folder)
    model = build(run.shape, initialize=False).eval()
    places = tensors_of(model)

    def put(name: str, tensor: Tensor) -> None:
        places[name].detach().copy_(tensor)

    run.load(put)
    return model


@torch.no_grad()
def measure() -> dict[str, Any]:
    """Errors of every variant, and the largest of all."""
    variants = {}
    for name in PEERS:
        with tempfile.TemporaryDirectory() as temporary:
            folder = Path(temporary)
            variants[name] = {
                "imported": imported_error(name, folder / "import"),
                "exported": exported_error(name, folder / "export"),
            }
    largest = max(error for errors in variants.values() for error in errors.values())
    return {"largest_relative_error": largest, "variants": variants}


def main() -> None:
    """Print the table, or one JSON document."""
    import transformers

    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    result = measure()
    if options.json:
        print(json.dumps(result, indent=1))
        return
    for name, errors in result["variants"].items():
        print(f"{name:<24} imported {errors['imported']:.1e}  exported {errors['exported']:.1e}")
    print(f"{'largest':<24} {result['largest_relative_error']:.1e}")


if __name__ == "__main__":
    main()
