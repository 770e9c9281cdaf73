"""The next token by its published definitions, number by number: what the engine's sampler is held to.

Shares no code with it but `uniform`, which is what a request's draws are defined by.
"""

import math

from kvledger.backends.serving.sampling.sampling import uniform

NOTHING = -math.inf


def adjusted(logits, settings, prompt_ids, outputs, ending=()):
    """Logits as a list, with `min_tokens`, `logit_bias` and the penalties applied."""
    values = [float(value) for value in logits]
    if len(outputs) < settings.min_tokens:
        for token in {*ending, *settings.stop_token_ids}:
            values[token] = NOTHING
    for token, bias in settings.logit_bias:
        values[token] += bias
    for token in {*prompt_ids, *outputs}:  # CTRL, arXiv:1909.05858, over prompt and output
        penalty = settings.repetition_penalty
        values[token] = values[token] / penalty if values[token] > 0 else values[token] * penalty
    for token in set(outputs):  # OpenAI's API, over the output
        values[token] -= settings.frequency_penalty * outputs.count(token) + settings.presence_penalty
    return values


def log_probabilities(logits):
    """Of the model's own distribution."""
    values = [float(value) for value in logits]
    top = max(values)
    whole = math.log(sum(math.exp(value - top) for value in values))
    return [value - top - whole for value in values]


def next_token(logits, settings, prompt_ids, outputs, ending=()):
    """The token behind `outputs`."""
    values = adjusted(logits, settings, prompt_ids, outputs, ending)
    top = max(values)
    if settings.temperature == 0:
        return values.index(top)
    weights = [math.exp((value - top) / settings.temperature) for value in values]
    tokens = list(range(len(values)))
    if settings.min_p or settings.top_k or settings.top_p < 1:
        tokens.sort(key=lambda token: -weights[token])
        tokens = [token for token in tokens if weights[token] >= settings.min_p * weights[tokens[0]]]
        tokens = tokens[: settings.top_k or None]
        share, kept = settings.top_p * sum(weights[token] for token in tokens), []
        for token in tokens:
            if sum(weights[other] for other in kept) < share:
                kept.append(token)
        tokens = kept
    target = uniform(settings.seed, len(outputs)) * sum(weights[token] for token in tokens)
    for token in tokens:
        target -= weights[token]
        if target < 0:
            return token
    return tokens[-1]


def outputs_alone(forward, settings, prompt_ids, ending=()):
    """Output tokens and the logits of each: `forward(token_ids)` continues one sequence of its own."""
    outputs, seen, logits_of_each = [], list(prompt_ids), []
    logits = forward(seen)
    while True:
        logits_of_each.append(logits)
        outputs.append(next_token(logits, settings, prompt_ids, outputs, ending))
        if len(outputs) == settings.max_tokens or outputs[-1] in {*ending, *settings.stop_token_ids}:
            return outputs, logits_of_each
        logits = forward(outputs[-1:])
