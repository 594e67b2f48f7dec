"""Hugging Face model folders, read as safetensors only: tensor by tensor, of each only the slice that is asked for."""

import json
from pathlib import Path

import torch
from huggingface_hub import snapshot_download
from safetensors import SafetensorError, safe_open
from torch import Tensor

from picotron.config import UserError, reason
from picotron.weights import Index, Value


def find_folder(name: str) -> Path:
    """`name` itself if it is a local folder, else the local copy of that hub model (downloaded at the first use)."""
    if Path(name).is_dir():
        return Path(name)
    try:
        return Path(snapshot_download(name, allow_patterns=["*.safetensors", "*.json"]))
    except Exception as error:  # whatever the hub's client throws: no such model, no network, no permission
        raise UserError(
            f"model.name={name!r} is no local folder and cannot be downloaded ({reason(error)}); check the name, or give a folder"
        ) from None


class SafetensorsFolder:
    """The tensors of `model.safetensors`, or of the shards that `model.safetensors.index.json` lists.

    Raises:
        UserError: there is no such file, or it is damaged.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        index = folder / "model.safetensors.index.json"
        try:
            if index.exists():
                weight_map = json.loads(index.read_text())["weight_map"]
                self.file_of = {name: folder / file for name, file in weight_map.items()}
            else:
                single = folder / "model.safetensors"
                with safe_open(single, framework="pt") as file:
                    self.file_of = dict.fromkeys(file.keys(), single)
        except FileNotFoundError:
            raise UserError(
                f"{folder} has no model.safetensors and no model.safetensors.index.json; only safetensors are read, so save "
                f"the model with transformers' save_pretrained first"
            ) from None
        except (SafetensorError, ValueError, KeyError) as error:
            raise UserError(f"the safetensors of {folder} are damaged ({error}); fetch or save them again") from None

    def read(self, name: str, shape: torch.Size, index: Index = ()) -> Tensor:
        """The part `[index]` of one tensor, which should have `shape` as a whole; only that part is read.

        Raises:
            UserError: the folder does not have it, it has another shape, or its file is missing or damaged.
        """
        if name not in self.file_of:
            raise UserError(
                f"{self.folder} has no tensor {name}; is it a model of the same architecture and number of layers?"
            )
        path = self.file_of[name]
        try:
            with safe_open(path, framework="pt") as file:
                tensor = file.get_slice(name)
                if tensor.get_shape() != list(shape):
                    raise UserError(f"{name} of {path} has shape {tensor.get_shape()}; the model expects {list(shape)}")
                return tensor[index or ...]
        except FileNotFoundError:
            raise UserError(f"{path}, named by the index of {self.folder}, is missing; fetch it again") from None
        except SafetensorError as error:
            raise UserError(f"{path} is damaged ({error}); fetch or save it again") from None


def pretrained_value(name: str) -> Value:
    """For `materialise`: the values of the parameters in a model folder (or hub model) `name`."""
    return SafetensorsFolder(find_folder(name)).read
