"""Runs another engine over the workloads, under the conditions that ours has, and writes the same numbers.

    VENV/bin/python infra/bench/peers.py --engine vllm --model DIR --workload W1 W4 --json FILE

It runs with the interpreter of the environment that holds that engine and needs nothing else: the standard
library and the files beside this one. Every engine gets the same prompt ids, greedy, ends of sequence
ignored, and makes text of what it generated inside the timed part. Several workloads share one start, since
some engines take minutes for it; prefix caches are dropped between them. The file holds a list of records.
"""

from __future__ import annotations

import argparse
import os
import sys
import sysconfig
import time
from collections.abc import Callable, Mapping, Sequence
from importlib import import_module
from pathlib import Path
from typing import Any, Protocol

import measure
import reference
import workloads

Tokens = list[list[int]]
Options = Mapping[str, str]


class Peer(Protocol):
    """version: what to print. settings: what it was given, for the record."""

    version: str
    settings: dict[str, Any]

    def generate(self, items: Sequence[workloads.Item]) -> Tokens: ...

    def forget(self) -> None:
        """Drop cached prefixes."""


class Vllm:
    """vLLM on CPU through `LLM.generate`. Options: any argument of LLM (block_size, enforce_eager, ...)."""

    def __init__(self, model: str, dtype: str, threads: int, options: Options) -> None:
        environment = {
            "VLLM_CPU_KVCACHE_SPACE": "1",
            "VLLM_CPU_OMP_THREADS_BIND": f"0-{threads - 1}",
            "VLLM_ENABLE_V1_MULTIPROCESSING": "0",  # the fastest of its forms here
            "VLLM_NO_USAGE_STATS": "1",
            "VLLM_LOGGING_LEVEL": "WARNING",
            "HF_HUB_OFFLINE": "1",
        }
        for name, value in environment.items():
            os.environ.setdefault(name, value)
        vllm: Any = import_module("vllm")

        self.settings: dict[str, Any] = {
            "max_model_len": 4096,
            "block_size": 32,
            "enable_prefix_caching": True,
        }
        self.settings |= {name: _value(value) for name, value in options.items()}
        self._llm = vllm.LLM(model=model, dtype=dtype, **self.settings)
        self._params = vllm.SamplingParams
        self.settings |= {name: os.environ[name] for name in environment}
        self.settings["preloaded"] = [Path(p).name for p in os.environ.get("LD_PRELOAD", "").split(":") if p]
        self.version = f"vllm {vllm.__version__}"

    def generate(self, items: Sequence[workloads.Item]) -> Tokens:
        params = [
            self._params(temperature=0.0, max_tokens=item.max_tokens, ignore_eos=True) for item in items
        ]
        prompts = [{"prompt_token_ids": list(item.prompt)} for item in items]
        return [list(out.outputs[0].token_ids) for out in self._llm.generate(prompts, params, use_tqdm=False)]

    def forget(self) -> None:
        self._llm.reset_prefix_cache()


class OpenVino:
    """OpenVINO GenAI's continuous batching over an exported model.

    Options: max_num_batched_tokens, max_num_seqs, and properties of the CPU plugin in capitals
    (KV_CACHE_PRECISION=f32). Its prefix cache is looked up when a row is added, so that rows added together
    share nothing: `prime` sends the first row alone, inside the timed part, where a long prefix is shared.
    """

    def __init__(self, model: str, dtype: str, threads: int, options: Options) -> None:
        openvino_genai: Any = import_module("openvino_genai")
        scheduler = openvino_genai.SchedulerConfig()
        scheduler.cache_size = int(options.get("cache_size", 1))
        scheduler.enable_prefix_caching = options.get("prefix_cache", "true") == "true"
        scheduler.max_num_batched_tokens = int(options.get("max_num_batched_tokens", 1024))
        scheduler.max_num_seqs = int(options.get("max_num_seqs", 128))
        hint = {"float32": "f32", "bfloat16": "bf16", "float16": "f16"}[dtype]
        plugin: dict[str, Any] = {"INFERENCE_NUM_THREADS": threads, "INFERENCE_PRECISION_HINT": hint}
        plugin |= {name: _value(value) for name, value in options.items() if name.isupper()}
        named = ("cache_size", "enable_prefix_caching", "max_num_batched_tokens", "max_num_seqs")
        self.settings = {name: getattr(scheduler, name) for name in named} | plugin
        self.version = f"openvino_genai {openvino_genai.__version__}"
        self._genai = openvino_genai
        self._build: Callable[[], Any] = lambda: openvino_genai.ContinuousBatchingPipeline(
            model, scheduler, "CPU", plugin
        )
        self._pipeline = self._build()

    def generate(self, items: Sequence[workloads.Item]) -> Tokens:
        if len(items) > 1 and len(shared_prefix(items)) >= 256:
            return self._together(items[:1]) + self._together(items[1:])
        return self._together(items)

    def _together(self, items: Sequence[workloads.Item]) -> Tokens:
        numpy: Any = import_module("numpy")
        openvino: Any = import_module("openvino")
        configs = []
        for item in items:
            config = self._genai.GenerationConfig()
            config.max_new_tokens, config.ignore_eos, config.do_sample = item.max_tokens, True, False
            configs.append(config)
        prompts = [openvino.Tensor(numpy.array([item.prompt], dtype=numpy.int64)) for item in items]
        outputs = [list(out.m_generation_ids[0]) for out in self._pipeline.generate(prompts, configs)]
        self._pipeline.get_tokenizer().decode(outputs)
        return outputs

    def forget(self) -> None:
        """Nothing public drops its prefix cache, so that a new pipeline takes its place."""
        del self._pipeline
        self._pipeline = self._build()
        self.generate(workloads.warm_up(8))


class Transformers:
    """transformers' own continuous batching. Options: fields of ContinuousBatchingConfig, and `attention`.

    Unless told, it takes nine tenths of the memory there is for keys and values: it gets a gigabyte as well.
    """

    def __init__(self, model: str, dtype: str, threads: int, options: Options) -> None:
        import torch
        import transformers
        from transformers.generation.configuration_utils import ContinuousBatchingConfig

        torch.set_num_threads(threads)
        self.version = f"transformers {transformers.__version__}, torch {torch.__version__}"
        self._tokenizer = transformers.AutoTokenizer.from_pretrained(model)
        self._model = transformers.AutoModelForCausalLM.from_pretrained(
            model, dtype=getattr(torch, dtype)
        ).eval()
        given = {"page_size": 64, "max_batch_tokens": 512} | {k: _value(v) for k, v in options.items()}
        attention = given.pop("attention", None)
        if attention is not None:
            self._model.set_attn_implementation(attention)
        config = self._model.config
        token = 2 * config.num_hidden_layers * config.num_key_value_heads * config.head_dim
        page = token * getattr(torch, dtype).itemsize * given["page_size"]
        given.setdefault("num_blocks", 2**30 // page)
        self.settings = dict(given, attention=attention)
        self._batching = ContinuousBatchingConfig(use_cuda_graph=False, **given)
        self._greedy = transformers.GenerationConfig(do_sample=False, eos_token_id=-1, pad_token_id=2)

    def generate(self, items: Sequence[workloads.Item]) -> Tokens:
        self._greedy.max_new_tokens = max(item.max_tokens for item in items)
        done: dict[str, list[int]] = {}
        with self._model.continuous_batching_context_manager(
            generation_config=self._greedy,
            continuous_batching_config=self._batching,
            block=True,
            timeout=10,
            warmup=False,
        ) as manager:
            ids = [manager.add_request(list(i.prompt), max_new_tokens=i.max_tokens) for i in items]
            while len(done) < len(items):
                result = manager.get_result(timeout=5)
                if result is None:
                    if not manager.is_running():
                        raise RuntimeError("Its generation thread ended early.")
                elif result.is_finished():
                    if result.error:
                        raise RuntimeError(result.error)
                    done[result.request_id] = list(result.generated_tokens)
        outputs = [done[row] for row in ids]
        self._tokenizer.batch_decode(outputs)
        return outputs

    def forget(self) -> None:
        """Each call of generate has a cache of its own."""


PEERS: dict[str, Callable[[str, str, int, Options], Peer]] = {
    "vllm": Vllm,
    "openvino": OpenVino,
    "transformers": Transformers,
}


def shared_prefix(items: Sequence[workloads.Item]) -> tuple[int, ...]:
    """What all prompts begin with."""
    low, high = min(item.prompt for item in items), max(item.prompt for item in items)
    length = next((i for i, (a, b) in enumerate(zip(low, high, strict=False)) if a != b), len(low))
    return low[:length]


def run(peer: Peer, name: str, options: argparse.Namespace) -> dict[str, Any]:
    """One workload; the record without what is the same for all of them."""
    items = workloads.read(options.workloads, name, options.rows, options.max_tokens)
    with measure.Watch() as watch:
        began = time.perf_counter()
        outputs = peer.generate(items)
        seconds = time.perf_counter() - began
    made, given = sum(map(len, outputs)), sum(len(item.prompt) for item in items)
    wrong = sum(len(out) != item.max_tokens for out, item in zip(outputs, items, strict=True))
    if wrong:
        raise RuntimeError(f"{wrong} rows of {name} have not the length that was asked for.")
    record = {
        "workload": name,
        "max_tokens": options.max_tokens,
        "workload_sha256": workloads.digest(options.workloads, name),
        "output_tokens_per_second": round(made / seconds, 2),
        "total_tokens_per_second": round((made + given) / seconds, 2),
        "seconds": round(seconds, 3),
        "rows": len(items),
        "output_tokens": made,
        "prompt_tokens": given,
        "peak_rss_mb": round(watch.peak_mb, 1),
        "own_cores": watch.own_cores,
        "other_cores": watch.other_cores,
    }
    if options.reference is not None:
        tokens = {item.id: out for item, out in zip(items, outputs, strict=True)}
        record["reference"] = reference.compare(tokens, options.reference, name, record["workload_sha256"])
    return record


def preload() -> None:
    """Start again under tcmalloc and Intel's OpenMP where they are installed, as vLLM asks for on CPU."""
    places = [Path(p) for p in ("/usr/lib", "/usr/lib64", f"/usr/lib/{os.uname().machine}-linux-gnu")]
    places += [Path(sys.prefix) / "lib", Path(sysconfig.get_paths()["purelib"])]
    wanted = ("libtcmalloc_minimal.so.4", "libiomp5.so")
    found = [next((p / name for p in places if (p / name).exists()), None) for name in wanted]
    if "LD_PRELOAD" not in os.environ and any(found):
        os.environ["LD_PRELOAD"] = ":".join(str(path) for path in found if path)
        os.execv(sys.executable, [sys.executable, *sys.argv])


def _value(text: str) -> Any:
    """true, false, whole numbers, and text."""
    if text in ("true", "false"):
        return text == "true"
    return int(text) if text.lstrip("-").isdigit() else text


def arguments(words: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Run another engine over the workloads.")
    add = parser.add_argument
    add("--engine", required=True, choices=sorted(PEERS))
    add("--model", required=True, help="a directory that this engine loads")
    add("--dtype", default="bfloat16", choices=["float32", "bfloat16", "float16"])
    add("--quantization", help="what the weights of this model are, for the record: int8")
    add("--workload", required=True, nargs="+", choices=workloads.NAMES)
    add("--workloads", type=Path, default=Path("out/bench/workloads"))
    add("--threads", type=int, default=measure.cores())
    add("--rows", type=int, help="only the first rows of each workload")
    add("--max-tokens", type=int, help="at most so many tokens a row")
    add("--option", action="append", default=[], metavar="NAME=VALUE", help="of the engine; see its class")
    add("--reference", type=Path, help="compare with the tokens that reference.py wrote")
    add("--json", type=Path, required=True)
    return parser.parse_args(words)


def main(words: Sequence[str] | None = None) -> None:
    options = arguments(words)
    os.environ["OMP_NUM_THREADS"] = str(options.threads)
    if options.engine == "vllm":
        preload()
    given = dict(pair.split("=", 1) for pair in options.option)
    with measure.Watch() as start:
        began = time.perf_counter()
        peer = PEERS[options.engine](options.model, options.dtype, options.threads, given)
        load_seconds = time.perf_counter() - began
        peer.generate(workloads.warm_up(1, max_tokens=1))
        first = measure.process_age()
        began = time.perf_counter()
        peer.generate(workloads.warm_up(8))
        warm_up_seconds = time.perf_counter() - began
    same: dict[str, Any] = {
        "engine": options.engine,
        "version": peer.version,
        "model": Path(options.model).name,
        "settings": {"dtype": options.dtype, "threads": options.threads, **peer.settings},
        "load_seconds": round(load_seconds, 3),
        "first_token_seconds": round(first, 3),
        "warm_up_seconds": round(warm_up_seconds, 3),
        "start_peak_rss_mb": round(start.peak_mb, 1),
        "machine": measure.machine(),
        "command": measure.command_line(),
    }
    if options.quantization:
        same["settings"]["quantization"] = options.quantization
    records = []
    for name in options.workload:
        peer.forget()
        records.append({**same, **run(peer, name, options)})
        measure.save(options.json, records)
    # Some engines hang in their own ends; everything is written.
    sys.stdout.flush()
    os._exit(0)


if __name__ == "__main__":
    main()
