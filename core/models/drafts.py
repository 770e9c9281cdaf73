"""Speculative decoding: what the drafter stores, and what it changes about the caches of the model itself."""

import attrs

from ..errors import InputError, non_negative, positive
from .geometry import ModelGeometry
from .layer_cache import LayerCaches, SequenceStateCache, WindowBufferCache
from .weights import Groups, WeightKind, whole

METHODS = ("mtp", "eagle", "draft_model", "ngram")
# Where a config says how many layers of a multi-token predictor its checkpoint has.
_PREDICTOR_LAYERS = ("num_nextn_predict_layers", "mtp_num_hidden_layers", "num_mtp_layers")


@attrs.frozen(kw_only=True)
class Drafts:
    """A drafter that proposes `num_tokens` tokens, which the model verifies in one step.

    Attributes:
        method: "mtp" (the checkpoint's own predictor), "eagle", "draft_model" or "ngram" (looks the drafts up in the
            prompt, and stores nothing).
        num_tokens: drafts for each request and decode step.
        num_layers: layers of the drafter, which store keys and values like a full layer of the model.
        model: the draft model, under "draft_model".
    """

    method: str
    num_tokens: int = attrs.field(validator=positive)
    num_layers: int = attrs.field(validator=non_negative)
    model: ModelGeometry | None = None

    @property
    def uses_hidden_states(self) -> bool:
        """Whether the drafter needs the model's hidden states, so that a cached hit gives its last block back."""
        return self.method in ("mtp", "eagle")

    @property
    def num_lookahead_tokens(self) -> int:
        """Slots that a step reserves for the drafts after those that it verifies."""
        return 0 if self.method == "ngram" else self.num_tokens

    def layers_with(self, geometry: ModelGeometry) -> LayerCaches:
        """What every layer stores: the model's, with room for drafts in its states, then the drafter's.

        A convolution keeps one more input for each draft, because rejected drafts are taken back.
        """
        layers = [
            tuple(
                attrs.evolve(cache, num_draft_tokens=self.num_tokens)
                if isinstance(cache, SequenceStateCache)
                else cache
                for cache in caches
            )
            for caches in geometry.layers
        ]
        return (*layers, *self.own_layers(geometry))

    def own_layers(self, geometry: ModelGeometry) -> LayerCaches:
        """What the drafter's layers store.

        Raises:
            InputError: the model has no layer that stores keys and values of every token.
        """
        if self.model is not None:
            return self.model.layers
        if not self.num_layers:
            return ()
        for caches in reversed(geometry.layers):
            windows = tuple(cache for cache in caches if isinstance(cache, WindowBufferCache))
            if windows:  # DeepSeek V4's predictor compresses nothing
                return (windows,) * self.num_layers
            if caches and not any(isinstance(cache, SequenceStateCache) for cache in caches):
                return (caches,) * self.num_layers
        raise InputError(f"{geometry.name}: no layer stores keys and values, so a drafter's layers are not known")

    def weights(self, geometry: ModelGeometry) -> Groups:
        """Parameters of the drafter: a layer like the model's last one, with a projection of two inputs to one.

        Raises:
            InputError: the model's parameters are not known.
        """
        if self.model is not None:
            return self.model.weights.on_stage(0, self.model.num_hidden_layers)
        size = geometry.hidden_size
        layer = (*geometry.weights.layers[-1], whole("draft input", WeightKind.ATTENTION, 2 * size, size))
        return layer * self.num_layers

    def assumption(self) -> str:
        """One sentence for the reader of a plan."""
        num_layers = len(self.model.layers) if self.model is not None else self.num_layers
        stored = {0: "no draft layer stores", 1: "1 draft layer stores"}.get(
            num_layers, f"{num_layers} draft layers store"
        )
        return (
            f"{self.num_tokens} draft tokens a step by {self.method}; {stored} keys and values (speculative_method, "
            "num_draft_layers)"
        )


def drafts_for(
    geometry: ModelGeometry,
    num_tokens: int,
    *,
    method: str | None = None,
    num_layers: int | None = None,
    model: ModelGeometry | None = None,
) -> Drafts | None:
    """The drafter of a model; None without drafts.

    Args:
        geometry: the model that verifies the drafts.
        num_tokens: drafts for each request and decode step; 0: none.
        method: one of `METHODS`; None: "draft_model" with `model`, "mtp" if the config names predictor layers, else
            "eagle".
        num_layers: layers of the drafter; None: as the config says, or 1.
        model: the draft model.

    Raises:
        InputError: an unknown method, or values that contradict each other.
    """
    if not num_tokens:
        if method is not None or num_layers is not None or model is not None:
            raise InputError(
                "speculative_method, num_draft_layers and draft_model say how drafts are made; give "
                "num_speculative_tokens too"
            )
        return None
    named = next((geometry.fields.integer(name) for name in _PREDICTOR_LAYERS if geometry.fields.has(name)), 0)
    if method is None:
        method = "draft_model" if model is not None else "mtp" if named else "eagle"
    if method not in METHODS:
        raise InputError(f"speculative_method is {method!r}; it must be one of {', '.join(METHODS)}")
    if (method == "draft_model") != (model is not None):
        raise InputError(f"speculative_method {method!r} and draft_model go together: give both, or neither")
    if num_layers is not None and method in ("ngram", "draft_model"):
        raise InputError(f"num_draft_layers {num_layers} has no effect on speculative_method {method!r}")
    if num_layers is None:
        num_layers = {"mtp": max(named, 1), "eagle": 1}.get(method, 0)
    return Drafts(method=method, num_tokens=num_tokens, num_layers=num_layers, model=model)
