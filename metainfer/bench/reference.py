"""The same checkpoint in `transformers`, float32 or float64, on exactly decoded weights.

This is the oracle for answers and the peer for speed on a CPU. `transformers` is an extra; it is
imported here only.
"""

from __future__ import annotations

from typing import Any

import torch

from metainfer.core.errors import UserError
from metainfer.executor.loading import tensor_source
from metainfer.formats.quant import dequantise
from metainfer.planner.opening import OpenedModel


def transformers_model(opened: OpenedModel, dtype: torch.dtype = torch.float32) -> Any:
    """A `transformers` causal model with the checkpoint's decoded weights, in eval mode.

    Raises:
        UserError: `transformers` is not installed.
    """
    try:
        import transformers
    except ImportError as error:
        raise UserError(
            "transformers is not installed.", "Install it: pip install transformers."
        ) from error
    library: Any = transformers
    config = library.AutoConfig.for_model(**dict(opened.source.config))
    config._attn_implementation = "sdpa"
    with torch.device("meta"):
        model: Any = library.AutoModelForCausalLM.from_config(config)
    source = tensor_source(opened, torch.device("cpu"))
    state = {}
    for spec in (*opened.arch.packed_weights(), *opened.arch.plain_weights()):
        for name in (*spec.tensors, *spec.bias):
            if name not in state:
                state[name] = dequantise(source.read(name), dtype)
    model.load_state_dict(state, assign=True, strict=False)
    model.tie_weights()
    _make_rotary_buffers(model, config)
    left = [name for name, tensor in model.state_dict().items() if tensor.is_meta]
    if left:
        raise UserError(
            f"transformers expects tensors that the checkpoint lacks: {left[:3]}.",
            "Leave --against out, or take a version of transformers that knows this model.",
        )
    return model.to(dtype).eval()


def _make_rotary_buffers(model: Any, config: Any) -> None:
    """Buffers that are not in the state dict stay on the meta device; build the module anew."""
    model.model.rotary_emb = type(model.model.rotary_emb)(config=config)
