"""Writes embedding layers for TensorBoard's projector. Independent of hooks and models."""

import os
import shutil
from collections.abc import Mapping
from pathlib import Path

import numpy as np
from torch import Tensor, nn

from ...errors import ArgumentError

# As in Keras: one file for all embedding layers, or a dict of files by layer name.
Metadata = str | os.PathLike[str] | Mapping[str, str | os.PathLike[str]] | None


def find_embedding_layers(module: nn.Module) -> dict[str, str]:
    """Return the names of a module's embedding layers, each with the name of its weight.

    Example:
        >>> find_embedding_layers(nn.Sequential(nn.Embedding(3, 2), nn.Flatten()))
        {'0': '0.weight'}
    """
    layers = {name: layer for name, layer in module.named_modules() if isinstance(layer, nn.Embedding)}
    return {name or "embedding": f"{name}.weight".removeprefix(".") for name in layers}


def find_metadata_files(metadata: Metadata, layers: Mapping[str, str], folder: str) -> dict[str, Path]:
    """Return the label files by embedding layer, given `TensorBoard`'s argument and the layers.

    Paths are relative to the folder.

    Raises:
        ArgumentError: A layer or file doesn't exist.
    """
    if metadata is None:
        return {}
    by_layer = metadata if isinstance(metadata, Mapping) else dict.fromkeys(layers, metadata)
    files = {name: Path(folder, file) for name, file in by_layer.items()}
    for name, file in files.items():
        if name not in layers:
            known = ", ".join(layers) or "none"
            raise ArgumentError(f"embeddings_metadata must name embedding layers ({known}), got {name!r}")
        if not file.is_file():
            raise ArgumentError(f"embeddings_metadata must be files that exist, got {file}: write a label on each line")
    return files


def write_embeddings(folder: Path, tables: Mapping[str, Tensor], files: Mapping[str, Path]) -> None:
    """Write embeddings (weights on the host, by layer) to a run's folder, and replace the previous ones.

    Label files are copied, because TensorBoard reads nothing outside the run.
    """
    from tensorboard.plugins.projector import ProjectorConfig, visualize_embeddings

    folder.mkdir(parents=True, exist_ok=True)
    config = ProjectorConfig()
    for name, table in tables.items():
        embedding = config.embeddings.add(tensor_name=name, tensor_path=f"{name}.tsv")
        np.savetxt(folder / embedding.tensor_path, table.float().numpy(), fmt="%.9g", delimiter="\t")
        if name in files:
            embedding.metadata_path = f"{name}.metadata.tsv"
            shutil.copyfile(files[name], folder / embedding.metadata_path)
    visualize_embeddings(str(folder), config)  # last: TensorBoard then reads the files that it names
