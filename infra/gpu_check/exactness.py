"""The engine's tokens on the card: transformers' there, and those of the CPU path, for every family.

Tiny models with seeded random weights, spread widely, in float32. A token is right if transformers gives no
other a logit that is higher by more than another order of summation can make: so every token of every row
is looked at, and a near tie is no fault. However rows are scheduled, their tokens must be the same.
"""

from __future__ import annotations

import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import transformers
from transformers import AutoModelForCausalLM, PreTrainedModel

from gpu_check.engines import TINY, answers, greedy, on_card, on_cpu, write_tokenizer
from gpu_check.fault import broken
from gpu_check.record import Check, Findings
from gpu_check.setting import Setting
from pagemill.engine.request import Request, SamplingParams

CONTEXT = 1024
SIZES: dict[str, Any] = {
    "vocab_size": 503,
    "hidden_size": 256,
    "intermediate_size": 384,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "max_position_embeddings": CONTEXT,
    "bos_token_id": None,
    "eos_token_id": None,
    "pad_token_id": None,
}
LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 10_000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
YARN = {"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0, "original_max_position_embeddings": 64}
PARTIAL = {"rope_type": "default", "rope_theta": 10_000.0, "partial_rotary_factor": 0.75}
# With the embedding as its head a random model says the same token again and again.
GEMMA = {"query_pre_attn_scalar": 64, "sliding_window": 50, "tie_word_embeddings": False}
CAPS = {"attn_logit_softcapping": 3.0, "final_logit_softcapping": 8.0}
# Family: the config's class in transformers, and what the model is made to have.
FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "Llama": ("LlamaConfig", {"rope_parameters": LLAMA3}),
    "Mistral": ("MistralConfig", {"sliding_window": 75, "head_dim": 128}),
    "Qwen2": ("Qwen2Config", {"num_attention_heads": 7, "num_key_value_heads": 1, "hidden_size": 7 * 64}),
    "Qwen3": ("Qwen3Config", {"rope_parameters": YARN, "head_dim": 128}),
    "Gemma 2": ("Gemma2Config", GEMMA | CAPS),
    "Gemma 3": ("Gemma3TextConfig", GEMMA | {"num_hidden_layers": 7, "head_dim": 256}),
    "Phi-3": ("Phi3Config", {"rope_parameters": PARTIAL, "num_key_value_heads": 4}),
}
# Norms of queries and keys, norms inside of sums, windows: most that a family can have.
DRY_FAMILIES = ("Gemma 3",)
# How far float32 sums in another order may put a logit off; logits of these models are of about 5.
NEAR = 2e-3
# In 16 bits each layer's numbers are rounded, as a share of the spread of logits.
NEAR_IN_16_BITS = 0.25
# In 8 bits: what is rounded, the first capability that can, and how far off it may be, as such a share: twice
# the worst of 840 tokens of the Llama above in the plain forms on a CPU. Tokens drawn by lot are off by 3.
IN_8_BITS: tuple[tuple[dict[str, str], tuple[int, int], float], ...] = (
    ({"kv_cache_dtype": "int8"}, (8, 0), 0.22),
    ({"kv_cache_dtype": "fp8"}, (8, 9), 1.0),
    ({"quantization": "int8"}, (8, 0), 0.56),
    ({"quantization": "fp8"}, (8, 9), 2.5),
)


@dataclass(frozen=True, slots=True)
class Regime:
    """blocks: of memory, so few in one of them that rows must give way. budget: tokens of a step."""

    name: str
    blocks: int = 400
    budget: int = 512
    cache: bool = True


REGIMES = (
    Regime("together"),
    Regime("in chunks", budget=33),
    Regime("without the prefix cache", cache=False, budget=100),
    Regime("preempted", blocks=34, budget=64),
)


def run(setting: Setting, findings: Findings) -> None:
    names = DRY_FAMILIES if setting.dry else tuple(FAMILIES)
    index, of = setting.share
    for name in names[index::of]:
        if not setting.wants(f"engine: {name}"):
            continue
        if setting.left < 0:
            raise TimeoutError(f"the time was up before {name}")
        for check in family(setting, name):
            findings.checks.append(check)


def family(setting: Setting, name: str) -> Iterator[Check]:
    """All checks of one family; whatever one of them raises is its own failure."""
    with tempfile.TemporaryDirectory(prefix="gpu-check-") as place:
        folder = Path(place)
        model = tiny_model(setting, name)
        model.save_pretrained(folder)
        write_tokenizer(folder, model.config.vocab_size)
        model.to(setting.device)
        case = _Family(setting, name, folder, model)
        yield from case.checks()


def tiny_model(setting: Setting, name: str) -> PreTrainedModel:
    """Random weights, the same on every device, so large that its favourite tokens vary and lie apart."""
    kind, changes = FAMILIES[name]
    sizes = SIZES | changes
    if setting.dry:
        sizes |= TINY | {"query_pre_attn_scalar": 16} if "Gemma" in name else TINY
    if kind in ("Qwen2Config", "Phi3Config"):
        # They have no head_dim of their own.
        sizes.pop("head_dim")
    model = AutoModelForCausalLM.from_config(
        getattr(transformers, kind)(**sizes), attn_implementation="eager"
    )
    random = torch.Generator().manual_seed(setting.seed)
    gemma = kind.startswith("Gemma")
    centre = 0.0 if gemma else 1.0
    for parameter_name, parameter in model.eval().requires_grad_(False).named_parameters():
        if parameter_name.endswith("norm.weight"):
            parameter.uniform_(centre - 0.5, centre + 0.5, generator=random)
        elif parameter_name.endswith("bias"):
            parameter.normal_(std=0.5, generator=random)
        else:
            # Gemma multiplies its embeddings: as large as the others' they would drown what layers add.
            large = "embed" in parameter_name and not gemma
            parameter.normal_(std=0.7 if large else 1.5 * parameter.shape[-1] ** -0.5, generator=random)
    return model


class _Family:
    def __init__(self, setting: Setting, name: str, folder: Path, model: PreTrainedModel) -> None:
        self.setting, self.name, self.folder, self.model = setting, name, folder, model
        random = torch.Generator().manual_seed(setting.seed + 1)
        vocabulary = model.config.vocab_size
        lengths, self.count = ((1, 16, 17, 37, 90, 300), 40) if not setting.dry else ((17, 3), 2)
        texts = [torch.randint(0, vocabulary, (length,), generator=random).tolist() for length in lengths]
        # Two that begin alike.
        texts.append([*texts[-2][:70], *texts[0], 3] if not setting.dry else [*texts[0][:16], 3])
        self.rows = [greedy(str(number), text, self.count) for number, text in enumerate(texts)]

    def checks(self) -> Iterator[Check]:
        regimes = REGIMES[:1] if self.setting.dry else REGIMES
        first: dict[str, list[int]] = {}
        for regime in regimes:
            name = f"engine: {self.name}, {regime.name}"
            try:
                found = self._tokens(regime, self.rows, name)
                first = first or found
                yield self._as_transformers(name, found, NEAR)
            except Exception as error:
                yield _failed(name, error)
        if not first:
            return
        name = f"engine: {self.name}, on CPU"
        try:
            yield self._as_on_cpu(name, first)
        except Exception as error:
            yield _failed(name, error)
        if not self.setting.dry:
            yield from self._sampled()
            yield from self._in_16_bits()
        if self.setting.dry or self.name == "Llama":
            yield from self._in_8_bits()

    def _tokens(
        self, regime: Regime, rows: Sequence[Request], name: str, dtype: str = "float32", **numbers: str
    ) -> dict[str, list[int]]:
        limits = {"num_blocks": regime.blocks, "max_num_tokens": regime.budget, "max_num_seqs": 8}
        if self.setting.dry:
            limits = {"num_blocks": 16, "max_num_tokens": 32, "max_num_seqs": 2}
        options: dict[str, Any] = {"dtype": dtype, "prefix_cache": regime.cache, **limits, **numbers}
        with (
            broken(self.setting.fault, name) as spoilt,
            on_card(self.setting, self.folder, **options) as engine,
        ):
            done = answers(engine, rows)
            if regime.name == "preempted" and not engine.metrics().preemptions:
                raise RuntimeError("no row was preempted, which this is to try")
            tokens = {key: list(completion.token_ids) for key, completion in done.items()}
            (spoilt_tokens,) = spoilt((torch.tensor(tokens["0"]),))
            return tokens | {"0": (spoilt_tokens % self.model.config.vocab_size).tolist()}

    def _shortfall(self, row: Request, tokens: list[int]) -> tuple[torch.Tensor, float]:
        """How much lower transformers' logit of each token is than its best, and the spread of logits."""
        text = torch.tensor([[*row.prompt_token_ids, *tokens[:-1]]], device=self.setting.device)
        with torch.inference_mode():
            logits = self.model(text).logits[0, len(row.prompt_token_ids) - 1 :].float()
        mine = logits.gather(1, torch.tensor(tokens, device=logits.device)[:, None]).squeeze(1)
        return logits.amax(-1) - mine, float(logits.std())

    def _as_transformers(self, name: str, found: dict[str, list[int]], near: float) -> Check:
        worst, wrong, total = 0.0, 0, 0
        for row in self.rows:
            tokens = found[row.request_id]
            if len(tokens) != self.count:
                return Check(name, False, None, f"row {row.request_id} has {len(tokens)} tokens")
            short, _ = self._shortfall(row, tokens)
            worst, total = max(worst, float(short.max())), total + len(tokens)
            wrong += int((short > near).sum())
        detail = f"{wrong} of {total} tokens are not transformers'" if wrong else ""
        kinds = len({token for tokens in found.values() for token in tokens})
        if kinds < total // 20:
            wrong, detail = 1, f"only {kinds} different tokens in {total}: this would show nothing"
        return Check(name, not wrong, round(worst / near, 4), detail)

    def _as_on_cpu(self, name: str, found: dict[str, list[int]]) -> Check:
        options = {"num_blocks": 16, "max_num_tokens": 64} if self.setting.dry else {"num_blocks": 400}
        done = answers(on_cpu(self.folder, dtype="float32", max_num_seqs=8, threads=2, **options), self.rows)
        differ = []
        for row in self.rows:
            mine, theirs = found[row.request_id], list(done[row.request_id].token_ids)
            at = next(
                (i for i, pair in enumerate(zip(mine, theirs, strict=True)) if pair[0] != pair[1]), None
            )
            if at is None:
                continue
            # A near tie may go either way; what follows it is another text.
            short = max(float(self._shortfall(row, each[: at + 1])[0][-1]) for each in (mine, theirs))
            if short > NEAR:
                differ.append(f"row {row.request_id} from token {at} on")
        return Check(name, not differ, None, ", ".join(differ))

    def _sampled(self) -> Iterator[Check]:
        """Drawn by a seed, a row's tokens are its own: alone, beside others, in chunks, preempted."""
        params = SamplingParams(max_tokens=self.count, temperature=0.9, top_p=0.95, top_k=50, ignore_eos=True)
        rows = [
            Request(row.request_id, row.prompt_token_ids, params, seed=7 + i)
            for i, row in enumerate(self.rows)
        ]
        name = f"engine: {self.name}, sampled tokens are the row's own"
        try:
            alone = self._tokens(REGIMES[0], rows[:1], name)["0"]
            others = {regime.name: self._tokens(regime, rows, name)["0"] for regime in REGIMES}
            differ = [regime for regime, tokens in others.items() if tokens != alone]
            yield Check(
                name,
                not differ and len(set(alone)) > 3,
                None,
                f"not so {', '.join(differ)}" if differ else "",
            )
        except Exception as error:
            yield _failed(name, error)

    def _in_16_bits(self) -> Iterator[Check]:
        for dtype in ("bfloat16", "float16"):
            name = f"engine: {self.name}, {dtype} near float32"
            try:
                found = self._tokens(REGIMES[0], self.rows, name, dtype)
                spread = self._shortfall(self.rows[-1], found[self.rows[-1].request_id])[1]
                yield self._as_transformers(name, found, NEAR_IN_16_BITS * spread)
            except Exception as error:
                yield _failed(name, error)

    def _in_8_bits(self) -> Iterator[Check]:
        """However rows are scheduled, a token's numbers are rounded by themselves: the same tokens."""
        capability = (8, 0) if self.setting.dry else torch.cuda.get_device_capability(self.setting.device)
        for numbers, least, near in IN_8_BITS[:1] if self.setting.dry else IN_8_BITS:
            ((what, kind),) = numbers.items()
            name = f"engine: {self.name}, {what} {kind}"
            if capability < least:
                continue
            try:
                found = self._tokens(REGIMES[0], self.rows, name, **numbers)
                spread = self._shortfall(self.rows[-1], found[self.rows[-1].request_id])[1]
                yield self._as_transformers(f"{name}, near float32", found, near * spread)
                if not self.setting.dry and kind == "int8":
                    again = self._tokens(REGIMES[3], self.rows, name, **numbers)
                    differ = [row for row in found if found[row] != again[row]]
                    yield Check(
                        f"{name}, preempted",
                        not differ,
                        None,
                        f"other rows: {', '.join(differ)}" if differ else "",
                    )
            except Exception as error:
                yield _failed(name, error)


def _failed(name: str, error: Exception) -> Check:
    first = (str(error).strip().splitlines() or [""])[0][:300]
    return Check(name, False, None, f"{type(error).__name__}: {first}")
