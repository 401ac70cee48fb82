"""The frozen language model: loaded once, asked for features by the pipeline and for logits by the decoder."""

import json
from collections.abc import Sequence
from dataclasses import dataclass, replace
from hashlib import sha256
from pathlib import Path
from typing import Any

import torch
from huggingface_hub import snapshot_download
from huggingface_hub.errors import StrictDataclassError
from safetensors import SafetensorError
from torch import Tensor, nn
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

from draftsmith.compile import guard
from draftsmith.embedded import TARGET as EMBEDDED_TARGET
from draftsmith.errors import InputError
from draftsmith.hub_names import pinned
from draftsmith.target.capture import TapCapture, concatenated, decoder_layers
from draftsmith.target.trust import check_folder, explained_refusal

# What transformers raises for files that are damaged or say something impossible.
_REFUSALS = (
    OSError, ValueError, LookupError, TypeError, AttributeError, ArithmeticError, RuntimeError,
    SafetensorError, StrictDataclassError,
)  # fmt: skip
PADDING_WASTE = 1.15  # documents share a forward while padding stays below 15 %


@dataclass(frozen=True, slots=True)
class TargetSpec:
    """Which model: `demo` is the embedded one, anything else a folder or hub id (a folder `demo` is `./demo`).

    `revision` is that of the hub, for config, weights and tokenizer alike. `adapter` is a LoRA adapter to merge.
    """

    model: str
    revision: str | None = None
    trust_remote_code: bool = False
    adapter: str | None = None

    @property
    def path(self) -> str:
        return str(EMBEDDED_TARGET) if self.model == "demo" else self.model

    def _from_pretrained(self, factory: Any, **more: Any) -> Any:
        if self.path.startswith((".", "/", "~")) and not Path(self.path).is_dir():
            raise InputError(f"target.model: folder {self.path} does not exist")
        try:
            return factory.from_pretrained(
                self.path, revision=self.revision, trust_remote_code=self.trust_remote_code, **more
            )
        except _REFUSALS as error:
            raise InputError(explained_refusal(self.model, error)) from error

    def config(self) -> Any:
        """The text part of the model's `config.json`."""
        return self._from_pretrained(AutoConfig).get_text_config(decoder=True)

    def skeleton(self) -> Any:
        """The model without weights: parameters have shapes (and ties), but no memory."""
        config = self._from_pretrained(AutoConfig)
        try:
            with torch.device("meta"):
                return AutoModelForCausalLM.from_config(config, trust_remote_code=self.trust_remote_code)
        except (ValueError, KeyError) as error:
            raise InputError(f"target.model {self.model!r}: {' '.join(str(error).splitlines())}") from error

    def model_with_adapter(self, dtype: torch.dtype | str) -> Any:
        """The model in host memory, its adapter merged if it has one. Of weights, only safetensors are ever read.

        Raises:
            InputError: model or adapter cannot be loaded.
        """
        check_folder(Path(self.path), f"target.model {self.model!r}")
        model, info = self._from_pretrained(
            AutoModelForCausalLM, dtype=dtype, output_loading_info=True, use_safetensors=True
        )
        if missing := sorted(info["missing_keys"]):  # they would be drawn at random
            raise InputError(
                f"target.model {self.model!r}: {len(missing)} of its weights are not in its files "
                f"({', '.join(missing[:3])}); copy the model again"
            )
        return merge_adapter(model, self.adapter) if self.adapter else model

    def tokenizer(self) -> Any:
        """The model's tokenizer.

        Raises:
            InputError: there is none. transformers makes an empty one up where the files are missing.
        """
        tokenizer = self._from_pretrained(AutoTokenizer)
        if not set(tokenizer.get_vocab().values()) - set(tokenizer.all_special_ids):
            raise InputError(f"target.model {self.model!r} has no tokenizer files; add those it was trained with")
        return tokenizer


@dataclass(frozen=True, eq=False, slots=True)
class Target:
    """A frozen causal LM with its taps. Threads on one device share it.

    `embedding_VH` and `head_VH` are the raw weights that loaders give the drafter; `fingerprint` tells whether a
    drafter belongs to this model, tokenizer and template.
    """

    spec: TargetSpec
    model: Any
    config: Any
    tokenizer: Any
    capture: TapCapture
    embedding_VH: Tensor
    head_VH: Tensor
    stop_ids: tuple[int, ...]
    fingerprint: str

    @property
    def device(self) -> torch.device:
        return self.embedding_VH.device

    @property
    def taps(self) -> tuple[int, ...]:
        return self.capture.taps

    def features(self, documents: Sequence[Tensor]) -> list[Tensor]:
        """Tapped hidden states of each document [T_i, F], each computed as if it were alone.

        Documents of similar length share a forward, padded on the right: in a causal model nothing after a token can
        reach it, so no mask is needed and any architecture works. Which documents share one depends only on the list.

        Args:
            documents: token ids [T_i], host memory.
        """
        result: list[Tensor | None] = [None] * len(documents)
        for group in _groups_by_length([len(d) for d in documents]):
            ids = nn.utils.rnn.pad_sequence([documents[i] for i in group], batch_first=True).to(self.device)
            with guard.shared(), torch.no_grad(), self.capture.collect(stop_after_last=True) as states:
                self.model(input_ids=ids, use_cache=False)
            hidden_DTF = concatenated(states)
            for place, i in enumerate(group):
                result[i] = hidden_DTF[place, : len(documents[i])]
        return [hidden for hidden in result if hidden is not None]

    def tapped(self, taps: Sequence[int]) -> "Target":
        """The same model with other layers tapped, for a drafter that wants those."""
        if tuple(taps) == self.taps:
            return self
        return replace(self, capture=TapCapture(decoder_layers(self.model, self.config.num_hidden_layers), taps))

    def replica(self, device: torch.device) -> "Target":
        """The same target on a device of its own; on the same device, the same object."""
        if device == self.device:
            return self
        return load_target(self.spec, self.taps, device, tokenizer=self.tokenizer)


def _groups_by_length(lengths: Sequence[int]) -> list[list[int]]:
    """Indices of documents, longest first, cut into groups whose padding stays below `PADDING_WASTE`."""
    groups: list[list[int]] = []
    used = 0
    for i in sorted(range(len(lengths)), key=lambda i: (-lengths[i], i)):
        if groups:
            padded = lengths[groups[-1][0]] * (len(groups[-1]) + 1)
            if padded <= PADDING_WASTE * (used + lengths[i]):
                groups[-1].append(i)
                used += lengths[i]
                continue
        groups.append([i])
        used = lengths[i]
    return groups


def compute_dtype(device: torch.device) -> torch.dtype | str:
    """On CPU everything computes in fp32, whatever the file stores; elsewhere in the file's own dtype."""
    return torch.float32 if device.type == "cpu" else "auto"


def stored_dtype(target_config: Any) -> torch.dtype:
    """The dtype that the weights are stored in, fp32 if the config does not say."""
    dtype = getattr(target_config, "dtype", None)
    return dtype if isinstance(dtype, torch.dtype) else torch.float32


def load_target(spec: TargetSpec, taps: Sequence[int], device: torch.device, *, tokenizer: Any = None) -> Target:
    """Loads a causal LM for features and decoding.

    Raises:
        InputError: the model cannot be loaded, has a head with bias, or layers that cannot be found.
    """
    model = spec.model_with_adapter(compute_dtype(device)).to(device).eval()
    model.requires_grad_(False)
    config = model.config.get_text_config(decoder=True)
    tokenizer = tokenizer or spec.tokenizer()
    embedding_VH, head_VH = frozen_weights(spec, model)
    return Target(
        spec=spec,
        model=model,
        config=config,
        tokenizer=tokenizer,
        capture=TapCapture(decoder_layers(model, config.num_hidden_layers), taps),
        embedding_VH=embedding_VH,
        head_VH=head_VH,
        stop_ids=_stop_ids(spec, model, tokenizer),
        fingerprint=fingerprint(model, tokenizer),
    )


def _stop_ids(spec: TargetSpec, model: Any, tokenizer: Any) -> tuple[int, ...]:
    """The ids that end an answer, from `generation_config.json`, else the tokenizer.

    Raises:
        InputError: the file is no JSON (transformers would go on without it), or they are no ids.
    """
    path = Path(spec.path) / "generation_config.json"
    try:
        if path.is_file():
            json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise InputError(f"target.model: {path} cannot be read: {error}; copy it again") from None
    eos = model.generation_config.eos_token_id
    eos = tokenizer.eos_token_id if eos is None else eos
    found = () if eos is None else tuple(eos) if isinstance(eos, (list, tuple)) else (eos,)
    if not all(isinstance(token, int) for token in found):
        raise InputError(f"target.model {spec.model!r}: eos_token_id is {eos!r}, expected a token id or a list of them")
    return found


def frozen_weights(spec: TargetSpec, model: Any) -> tuple[Tensor, Tensor]:
    """The embedding and the head, as loaders give them to the drafter.

    Raises:
        InputError: the head has a bias, or one of them is stored in whole numbers.
    """
    head = model.get_output_embeddings()
    if getattr(head, "bias", None) is not None:
        raise InputError(f"target.model {spec.model!r}: its output head has a bias, which no DFlash loader reads")
    weights = dense(model.get_input_embeddings().weight), dense(head.weight)
    odd = next((w.dtype for w in weights if not w.is_floating_point()), None)
    if odd is not None:
        raise InputError(
            f"target.model {spec.model!r}: its embedding or output head is quantised to {odd}, which a drafter cannot "
            "use; quantise the model without them"
        )
    return weights


def dense(weight: Tensor) -> Tensor:
    """A weight as an ordinary tensor: what a quantisation library wrapped is unpacked, a copy then."""
    plain = weight.detach()
    return plain if type(plain) is Tensor else plain.dequantize()


def merge_adapter(model: Any, adapter: str) -> Any:
    """The model with a LoRA adapter (PEFT folder or hub id, perhaps `owner/name@revision`) added to its weights, in
    the model's own dtype.

    Raises:
        InputError: peft is missing, or the adapter is no LoRA adapter of this model.
    """
    try:
        from peft import PeftConfig, PeftModel
    except ImportError:
        raise InputError("target.adapter needs peft, which is not installed: pip install 'draftsmith[lora]'") from None
    try:
        folder = _adapter_folder(adapter)
        settings = PeftConfig.from_pretrained(folder)
        if settings.peft_type != "LORA":
            kind = str(settings.peft_type).removeprefix("PeftType.")
            raise InputError(f"target.adapter {adapter!r} is a {kind} adapter; only LoRA adapters can be merged")
        settings.inference_mode = True
        if settings.megatron_config:  # peft would import a module that the adapter names
            raise InputError(f"target.adapter {adapter!r} was made for Megatron, which is not supported")
        wrapped = PeftModel(model, settings)
        loaded = wrapped.load_adapter(folder, "default", torch_device="cpu")
        if loaded.missing_keys or loaded.unexpected_keys:
            raise InputError(
                f"target.adapter {adapter!r} was made for another model: {len(loaded.missing_keys)} of its tensors are "
                f"missing, {len(loaded.unexpected_keys)} have no place in {type(model).__name__}"
            )
        return wrapped.merge_and_unload()
    except InputError:
        raise
    except (OSError, ValueError, KeyError, RuntimeError, TypeError) as error:
        first = next((line.strip() for line in str(error).splitlines() if line.strip()), type(error).__name__)
        raise InputError(f"target.adapter {adapter!r} cannot be merged into this target: {first}") from error


def _adapter_folder(adapter: str) -> str:
    """The folder of an adapter, or that of a hub id, its configuration and safetensors downloaded."""
    if not Path(adapter).is_dir():
        repository, revision = pinned(adapter)
        wanted = ["adapter_config.json", "adapter_model.safetensors"]
        adapter = snapshot_download(repository, revision=revision, allow_patterns=wanted)
    check_folder(Path(adapter), f"target.adapter {adapter!r}")
    return adapter


def fingerprint(model: nn.Module, tokenizer: Any) -> str:
    """Hash of the architecture, a sample of every weight, the vocabulary and the chat template.

    A sample (256 values of each tensor, rounded to bf16) tells a fine-tune from its base and costs the same for any
    size; it does not change with the dtype that the weights are computed in.
    """
    digest = sha256()
    for name, weight in model.named_parameters():
        sample = dense(weight).flatten()[:256].to(torch.bfloat16).float().cpu()
        digest.update(f"{name}{tuple(weight.shape)}".encode())
        digest.update(sample.numpy().tobytes())
    for token, index in sorted(tokenizer.get_vocab().items()):
        digest.update(f"{token}\0{index}\n".encode())
    digest.update(str(tokenizer.chat_template).encode())
    return digest.hexdigest()
