"""The frozen language model: loaded once, asked for features by the pipeline and for logits by the decoder."""

from collections.abc import Sequence
from dataclasses import dataclass
from hashlib import sha256
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

from draftsmith.embedded import TARGET as EMBEDDED_TARGET
from draftsmith.errors import InputError
from draftsmith.target.capture import TapCapture, concatenated, decoder_layers

PADDING_WASTE = 1.15  # documents share a forward while padding stays below 15 %


@dataclass(frozen=True, slots=True)
class TargetSpec:
    """Which model: `demo` is the embedded one, anything else a folder or hub id (a folder `demo` is `./demo`)."""

    model: str
    revision: str | None = None
    trust_remote_code: bool = False

    @property
    def path(self) -> str:
        return str(EMBEDDED_TARGET) if self.model == "demo" else self.model

    def _from_pretrained(self, factory: Any, **more: Any) -> Any:
        try:
            return factory.from_pretrained(
                self.path, revision=self.revision, trust_remote_code=self.trust_remote_code, **more
            )
        except (OSError, ValueError, KeyError) as error:
            first = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
            raise InputError(f"target.model {self.model!r} cannot be loaded: {first}") from error

    def config(self) -> Any:
        """The text part of the model's `config.json`."""
        return self._from_pretrained(AutoConfig).get_text_config(decoder=True)

    def tokenizer(self) -> Any:
        return self._from_pretrained(AutoTokenizer)


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
            with torch.no_grad(), self.capture.collect(stop_after_last=True) as states:
                self.model(input_ids=ids, use_cache=False)
            hidden_DTF = concatenated(states)
            for place, i in enumerate(group):
                result[i] = hidden_DTF[place, : len(documents[i])]
        return [hidden for hidden in result if hidden is not None]

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


def load_target(spec: TargetSpec, taps: Sequence[int], device: torch.device, *, tokenizer: Any = None) -> Target:
    """Loads a causal LM for features and decoding.

    Raises:
        InputError: the model cannot be loaded, has a head with bias, or layers that cannot be found.
    """
    model = spec._from_pretrained(AutoModelForCausalLM, dtype=compute_dtype(device)).to(device).eval()
    model.requires_grad_(False)
    config = model.config.get_text_config(decoder=True)
    tokenizer = tokenizer or spec.tokenizer()
    head = model.get_output_embeddings()
    if getattr(head, "bias", None) is not None:
        raise InputError(f"target.model {spec.model!r}: its output head has a bias, which no DFlash loader reads")
    eos = model.generation_config.eos_token_id
    eos = tokenizer.eos_token_id if eos is None else eos
    return Target(
        spec=spec,
        model=model,
        config=config,
        tokenizer=tokenizer,
        capture=TapCapture(decoder_layers(model, config.num_hidden_layers), taps),
        embedding_VH=model.get_input_embeddings().weight.detach(),
        head_VH=head.weight.detach(),
        stop_ids=() if eos is None else tuple(eos) if isinstance(eos, (list, tuple)) else (eos,),
        fingerprint=fingerprint(model, tokenizer),
    )


def fingerprint(model: nn.Module, tokenizer: Any) -> str:
    """Hash of the architecture, a sample of every weight, the vocabulary and the chat template.

    A sample (256 values of each tensor, rounded to bf16) tells a fine-tune from its base and costs the same for any
    size; it does not change with the dtype that the weights are computed in.
    """
    digest = sha256()
    for name, weight in model.named_parameters():
        sample = weight.detach().flatten()[:256].to(torch.bfloat16).float().cpu()
        digest.update(f"{name}{tuple(weight.shape)}".encode())
        digest.update(sample.numpy().tobytes())
    for token, index in sorted(tokenizer.get_vocab().items()):
        digest.update(f"{token}\0{index}\n".encode())
    digest.update(str(tokenizer.chat_template).encode())
    return digest.hexdigest()
