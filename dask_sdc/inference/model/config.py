"""What a model is: the numbers that decide its shapes; what is not supported is refused by name."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, fields
from typing import Any

from dask_sdc.exceptions import InputError

__all__ = ["ARCHITECTURES", "ModelConfig", "RopeScaling"]

#: Architectures that the forward pass knows.
ARCHITECTURES = ("llama", "gpt2")

_SILU = {"silu", "swish"}
#: All of them the same formula, 0.5·x·(1 + tanh(√(2/π)·(x + 0.044715·x³))).
_GELU_TANH = {"gelu_new", "gelu_pytorch_tanh", "gelu_tanh"}


@dataclass(frozen=True)
class RopeScaling:
    """How rotary frequencies are stretched for contexts longer than those of the training.

    Parameters
    ----------
    kind : str
        ``"linear"`` divides all frequencies by `factor`; ``"llama3"`` divides the low ones and blends
        between.
    factor : float
        The divisor, at least 1.
    low_freq_factor, high_freq_factor : float
        Bounds of the blend for ``"llama3"``, in wave lengths per original context.
    original_context : int
        Positions of the original context for ``"llama3"``.

    Raises
    ------
    InputError
        If the kind is another one or a value makes no sense.
    """

    kind: str
    factor: float
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    original_context: int = 8192

    def __post_init__(self) -> None:
        if self.kind not in ("linear", "llama3"):
            raise InputError(f"rope scaling: expected linear or llama3, got {self.kind!r}")
        for name in ("factor", "low_freq_factor", "high_freq_factor"):
            _positive(f"rope scaling: {name}", getattr(self, name))
        _count("rope scaling: original_context", self.original_context)
        if self.kind == "llama3" and not self.low_freq_factor < self.high_freq_factor:
            raise InputError(
                "rope scaling: expected low_freq_factor < high_freq_factor, got "
                f"{self.low_freq_factor!r} and {self.high_freq_factor!r}"
            )


@dataclass(frozen=True)
class ModelConfig:
    """Shape of a decoder.

    Parameters
    ----------
    architecture : str
        ``"llama"`` (RMSNorm, rotary positions, SwiGLU) or ``"gpt2"`` (LayerNorm, learned positions, GELU).
    vocab_size, hidden_size, n_layers, n_heads, n_kv_heads, head_dim, intermediate_size : int
        Sizes; query heads share key-value heads in groups of ``n_heads // n_kv_heads``.
    max_context : int
        Positions that the model was made for.
    norm_eps : float
        Added to the variance in every norm.
    rope_theta : float
        Base of the rotary frequencies; without meaning for gpt2.
    rope_scaling : RopeScaling or None
        How they are stretched.
    tied_embeddings : bool
        Whether the head is the embedding.
    attention_bias, mlp_bias : bool
        Whether the linear maps have biases; true for gpt2.
    sliding_window : tuple of int or None, length n_layers
        Keys that a row of a layer sees, its own included; None sees all. ``()`` stands for all None.
    sinks : int
        First positions that a layer with a window sees beside the window.
    activation : str
        ``"silu"`` or ``"gelu_tanh"``.
    bos_ids, eos_ids : tuple of int
        Tokens that begin and end a text.

    Raises
    ------
    InputError
        If a value is not supported; the message names the field.
    """

    architecture: str
    vocab_size: int
    hidden_size: int
    n_layers: int
    n_heads: int
    n_kv_heads: int
    head_dim: int
    intermediate_size: int
    max_context: int
    norm_eps: float = 1e-5
    rope_theta: float = 10000.0
    rope_scaling: RopeScaling | None = None
    tied_embeddings: bool = False
    attention_bias: bool = False
    mlp_bias: bool = False
    sliding_window: tuple[int | None, ...] = ()
    sinks: int = 0
    activation: str = "silu"
    bos_ids: tuple[int, ...] = ()
    eos_ids: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        if self.architecture not in ARCHITECTURES:
            raise InputError(f"architecture: expected one of {ARCHITECTURES}, got {self.architecture!r}")
        if not self.sliding_window:
            object.__setattr__(self, "sliding_window", (None,) * _count("n_layers", self.n_layers))
        self._check_sizes()
        self._check_values()

    def _check_sizes(self) -> None:
        for name in [
            "vocab_size",
            "hidden_size",
            "n_layers",
            "n_heads",
            "n_kv_heads",
            "head_dim",
            "intermediate_size",
            "max_context",
        ]:
            _count(name, getattr(self, name))
        if self.n_heads % self.n_kv_heads:
            raise InputError(f"n_kv_heads: expected a divisor of {self.n_heads} heads, got {self.n_kv_heads}")
        if self.architecture == "llama" and self.head_dim % 2:
            raise InputError(f"head_dim: rotary positions need an even number, got {self.head_dim}")
        if len(self.sliding_window) != self.n_layers:
            raise InputError(
                f"sliding_window: expected {self.n_layers} entries, one per layer, "
                f"got {len(self.sliding_window)}"
            )
        for window in self.sliding_window:
            if window is not None:
                _count("sliding_window", window)
        if isinstance(self.sinks, bool) or not isinstance(self.sinks, int) or self.sinks < 0:
            raise InputError(f"sinks: expected an int of at least 0, got {self.sinks!r}")

    def _check_values(self) -> None:
        _positive("norm_eps", self.norm_eps)
        _positive("rope_theta", self.rope_theta)
        expected = "silu" if self.architecture == "llama" else "gelu_tanh"
        if self.activation != expected:
            raise InputError(f"activation: {self.architecture} needs {expected}, got {self.activation!r}")
        if self.architecture == "gpt2" and not (self.attention_bias and self.mlp_bias):
            raise InputError("attention_bias, mlp_bias: gpt2 has biases everywhere, got a model without")

    @property
    def group(self) -> int:
        """Query heads per key-value head."""
        return self.n_heads // self.n_kv_heads

    @property
    def kv_size(self) -> int:
        """Width of all keys of a position, ``n_kv_heads * head_dim``."""
        return self.n_kv_heads * self.head_dim

    @property
    def q_size(self) -> int:
        """Width of all queries of a position, ``n_heads * head_dim``."""
        return self.n_heads * self.head_dim

    def to_dict(self) -> dict[str, Any]:
        """Return a JSON-able dict that `from_dict` takes."""
        plain = asdict(self)
        return {name: list(value) if isinstance(value, tuple) else value for name, value in plain.items()}

    @classmethod
    def from_dict(cls, plain: Mapping[str, Any]) -> ModelConfig:
        """Read what `to_dict` wrote.

        Raises
        ------
        InputError
            If a field is missing, unknown or not supported.
        """
        values: dict[str, Any] = dict(plain)
        if unknown := sorted(values.keys() - {field.name for field in fields(cls)}):
            raise InputError(f"model config: unknown fields {unknown}")
        scaling = values.get("rope_scaling")
        try:
            if isinstance(scaling, Mapping):
                values["rope_scaling"] = RopeScaling(**scaling)
            for name in ("sliding_window", "bos_ids", "eos_ids"):
                values[name] = tuple(values.get(name, ()))
            return cls(**values)
        except TypeError as error:
            raise InputError(f"model config: {error}") from error

    @classmethod
    def from_huggingface(cls, config: Mapping[str, Any]) -> ModelConfig:
        """Read the content of a Hugging Face ``config.json``.

        Parameters
        ----------
        config : mapping
            The parsed file; ``model_type`` is llama, mistral or gpt2.

        Raises
        ------
        InputError
            If the architecture or the value of a field is not supported, naming it.
        """
        kind = config.get("model_type")
        readers: dict[str, Callable[[Mapping[str, Any]], ModelConfig]] = {
            "llama": _read_llama,
            "mistral": _read_llama,
            "gpt2": _read_gpt2,
        }
        if not isinstance(kind, str) or kind not in readers:
            raise InputError(f"model_type: expected one of {sorted(readers)}, got {kind!r}")
        _refuse(config, "quantization_config", (None,))
        try:
            return readers[kind](config)
        except KeyError as error:
            raise InputError(f"config of a {kind} model lacks {error}") from error


def _read_llama(config: Mapping[str, Any]) -> ModelConfig:
    _refuse(config, "rope_interleaved", (None, False))
    activation = _refuse(config, "hidden_act", _SILU, default="silu")
    hidden, n_heads, n_layers = (
        config["hidden_size"],
        config["num_attention_heads"],
        config["num_hidden_layers"],
    )
    rope = _rope_parameters(config)
    return ModelConfig(
        architecture="llama",
        vocab_size=config["vocab_size"],
        hidden_size=hidden,
        n_layers=n_layers,
        n_heads=n_heads,
        n_kv_heads=_or(config.get("num_key_value_heads"), n_heads),
        head_dim=_or(config.get("head_dim"), hidden // n_heads),
        intermediate_size=config["intermediate_size"],
        max_context=_or(config.get("max_position_embeddings"), 2048),
        norm_eps=_or(config.get("rms_norm_eps"), 1e-6),
        rope_theta=float(_or(rope.get("rope_theta"), 10000.0)),
        rope_scaling=_rope_scaling(rope),
        tied_embeddings=bool(config.get("tie_word_embeddings", False)),
        attention_bias=bool(config.get("attention_bias", False)),
        mlp_bias=bool(config.get("mlp_bias", False)),
        sliding_window=_windows(config, n_layers),
        activation="silu" if activation in _SILU else activation,
        bos_ids=_ids(config.get("bos_token_id")),
        eos_ids=_ids(config.get("eos_token_id")),
    )


def _read_gpt2(config: Mapping[str, Any]) -> ModelConfig:
    _refuse(config, "activation_function", _GELU_TANH, default="gelu_new")
    _refuse(config, "scale_attn_weights", (True,), default=True)
    _refuse(config, "scale_attn_by_inverse_layer_idx", (False,), default=False)
    _refuse(config, "add_cross_attention", (False,), default=False)
    hidden, n_heads = config["n_embd"], config["n_head"]
    return ModelConfig(
        architecture="gpt2",
        vocab_size=config["vocab_size"],
        hidden_size=hidden,
        n_layers=config["n_layer"],
        n_heads=n_heads,
        n_kv_heads=n_heads,
        head_dim=hidden // n_heads,
        intermediate_size=_or(config.get("n_inner"), 4 * hidden),
        max_context=config["n_positions"],
        norm_eps=_or(config.get("layer_norm_epsilon"), 1e-5),
        tied_embeddings=bool(config.get("tie_word_embeddings", True)),
        attention_bias=True,
        mlp_bias=True,
        activation="gelu_tanh",
        bos_ids=_ids(config.get("bos_token_id")),
        eos_ids=_ids(config.get("eos_token_id")),
    )


def _rope_parameters(config: Mapping[str, Any]) -> dict[str, Any]:
    """Merge ``rope_theta``/``rope_scaling`` of older files with ``rope_parameters`` of newer ones."""
    found: dict[str, Any] = {"rope_theta": config.get("rope_theta")}
    for name in ("rope_scaling", "rope_parameters"):
        given = config.get(name) or {}
        if not isinstance(given, Mapping):
            raise InputError(f"{name}: expected a mapping, got {given!r}")
        found.update({key: value for key, value in given.items() if value is not None})
    _refuse({**config, **found}, "partial_rotary_factor", (None, 1.0))
    return found


def _rope_scaling(rope: Mapping[str, Any]) -> RopeScaling | None:
    kind = rope.get("rope_type", rope.get("type", "default"))
    if kind == "default":
        return None
    if kind == "linear":
        return RopeScaling("linear", float(rope["factor"]))
    if kind == "llama3":
        return RopeScaling(
            "llama3",
            float(rope["factor"]),
            float(rope["low_freq_factor"]),
            float(rope["high_freq_factor"]),
            rope["original_max_position_embeddings"],
        )
    raise InputError(f"rope_scaling: expected default, linear or llama3, got {kind!r}")


def _windows(config: Mapping[str, Any], n_layers: int) -> tuple[int | None, ...]:
    window = config.get("sliding_window")
    kinds = config.get("layer_types")
    if kinds is None:
        return (window,) * n_layers
    known = (
        {"full_attention": None} if window is None else {"sliding_attention": window, "full_attention": None}
    )
    if strange := sorted(set(kinds) - known.keys()):
        raise InputError(f"layer_types: expected {sorted(known)}, got {strange}")
    return tuple(known[kind] for kind in kinds)


def _ids(value: Any) -> tuple[int, ...]:
    if value is None:
        return ()
    return tuple(value) if isinstance(value, list | tuple) else (value,)


def _or(value: Any, default: Any) -> Any:
    return default if value is None else value


def _refuse(config: Mapping[str, Any], name: str, allowed: Any, default: Any = None) -> Any:
    """Return a field's value, and refuse all but the allowed ones."""
    value = config.get(name, default)
    if value not in allowed:
        raise InputError(f"{name}: expected one of {sorted(map(str, allowed))}, got {value!r}")
    return value


def _count(name: str, value: Any) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise InputError(f"{name}: expected an int of at least 1, got {value!r}")
    return value


def _positive(name: str, value: Any) -> None:
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < math.inf:
        raise InputError(f"{name}: expected a positive number, got {value!r}")
