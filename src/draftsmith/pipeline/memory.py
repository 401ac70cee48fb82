"""The memory of a run as a table: every entry has a formula, every formula is one function here (docs/memory.md).

Nothing is measured or allocated: all follows from counts of weights, the shape of the drafter and the config. Entries
are ceilings that may be alive at the same time. Letters are those of `nouns`; also c: bytes of a computed number
(4 on the CPU, 2 under autocast), n: bytes of a number inside a norm (4), e: bytes of a target weight.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from math import prod

from draftsmith.drafter.attention.blockwise import CHUNK_SLOTS, KEPT_MASK_BYTES
from draftsmith.drafter.attention.flex import TILE, whole_tiles
from draftsmith.drafter.config import DrafterConfig
from draftsmith.drafter.loss import chunk_labels
from draftsmith.pipeline.topology import Topology
from draftsmith.target.load import PADDING_WASTE

MIB = 2**20
PROCESS_BYTES = 448 * MIB  # measured: 370 for PyTorch and transformers in use, and what the allocator keeps
CUDA_HOST_BYTES, CUDA_DEVICE_BYTES = 512 * MIB, 1024 * MIB  # context and kernels, per device used; rule of thumb
BYTES_PER_TOKEN = 5  # of a document: an int32 id and a bool


@dataclass(frozen=True, slots=True)
class MemoryItem:
    """What lies where and how its size was computed. `place` is `host` or a device like `cuda:0`."""

    name: str
    place: str
    nbytes: int
    formula: str


@dataclass(frozen=True, slots=True)
class Sizes:
    """The numbers that the memory of a run follows from. `mlp_width` counts the columns of a target MLP that one token
    uses (several experts' for a mixture); `matrices` are the shapes of the drafter's matrices."""

    topology: Topology
    target_weights: int
    target_layers: int
    itemsize: int  # e
    mlp_width: int
    shape: DrafterConfig
    drafter_weights: int
    matrices: tuple[tuple[int, int], ...]
    optimizer: str
    row_tokens: int
    row_anchors: int
    batch_rows: int
    channel_bytes: int
    eval_tokens: int  # longest sequence that evaluation decodes, 0: it decodes none
    document_tokens: int = 0
    attention: str = "blockwise"
    checkpointing: str = "none"
    kept: MemoryItem | None = None  # features for later epochs

    @property
    def cuda(self) -> bool:
        return self.topology.target[0].startswith("cuda")

    @property
    def row_slots(self) -> int:
        """Q of the largest row, as attention pads it."""
        slots = self.row_anchors * self.shape.block_size
        return whole_tiles(slots) if self.attention == "flex" else slots

    @property
    def row_context(self) -> int:
        """T of the largest row, as attention pads it."""
        return whole_tiles(self.row_tokens) if self.attention == "flex" else self.row_tokens

    @property
    def row_bytes(self) -> int:
        """Features of the largest row."""
        return self.row_tokens * self.shape.feature_size * self.itemsize


def place_of(worker: str) -> str:
    """`cpu:n` workers share the host; a CUDA device is a place of its own."""
    return "host" if worker.startswith("cpu") else worker


def memory_table(sizes: Sizes) -> tuple[MemoryItem, ...]:
    """Everything a run keeps, place by place: the host first."""
    items = host_items(sizes)
    targets = [place_of(worker) for worker in sizes.topology.target]
    drafters = [place_of(worker) for worker in sizes.topology.drafter]
    for place in dict.fromkeys(targets):
        items += target_items(sizes, place, targets.count(place))
    for place in dict.fromkeys(drafters):
        items += drafter_items(sizes, place, drafters.count(place), with_frozen=place == targets[0])
    for place in sorted({*targets, *drafters} - {"host"}):
        items.append(MemoryItem("CUDA context", place, CUDA_DEVICE_BYTES, "rule of thumb"))
    return tuple(sorted((item for item in items if item.nbytes), key=lambda item: _order(item.place)))


def host_items(sizes: Sizes) -> list[MemoryItem]:
    """What the host holds besides the workers."""
    weights = sizes.drafter_weights
    found = [
        MemoryItem("Python and libraries", "host", PROCESS_BYTES, "measured once"),
        MemoryItem("drafter as it starts", "host", 4 * weights, f"4 x {weights:,} weights"),
        MemoryItem(
            "documents", "host", BYTES_PER_TOKEN * sizes.document_tokens, f"5 x {sizes.document_tokens:,} tokens"
        ),
    ]
    if sizes.kept:
        found.append(sizes.kept)
    if sizes.cuda:
        count, e = sizes.target_weights, sizes.itemsize
        state, how = optimizer_state(sizes)
        devices = len({*sizes.topology.target, *sizes.topology.drafter})
        found += [
            MemoryItem("target on its way", "host", e * count, f"{e} x {count:,} weights, one device after the other"),
            MemoryItem("checkpoint on its way", "host", 4 * weights + state, f"4 x {weights:,} + {how}"),
            MemoryItem("CUDA libraries", "host", CUDA_HOST_BYTES * devices, f"512 MiB x {devices} devices"),
        ]
    return found


def target_items(sizes: Sizes, place: str, workers: int) -> list[MemoryItem]:
    """What `workers` target workers keep at one place: they share the weights."""
    shape, e, count = sizes.shape, sizes.itemsize, sizes.target_weights
    tokens = int(PADDING_WASTE * sizes.row_tokens * sizes.batch_rows)
    hidden, replicas = shape.hidden_size, len(sizes.topology.drafter)
    queries, keys = shape.num_attention_heads * shape.head_dim, shape.num_key_value_heads * shape.head_dim
    width = 5 * hidden + max(3 * sizes.mlp_width, 5 * queries + 5 * keys)
    taps, channel = len(shape.target_layer_ids), sizes.channel_bytes
    found = [
        MemoryItem("target weights", place, e * count, f"{e} x {count:,} weights"),
        MemoryItem(
            "target activations", place, workers * e * tokens * width, f"{workers} x {e} x {tokens:,} x {width:,}",
        ),
        MemoryItem(
            "tapped states", place, workers * 2 * e * tokens * taps * hidden,
            f"{workers} x 2 x {e} x {tokens:,} tokens x {taps} x {hidden}",
        ),
        MemoryItem("channel", place, channel, "pipeline.channel_mib"),
        MemoryItem(
            "features in training", place, replicas * sizes.row_bytes,
            f"{replicas} replicas x {e} x {sizes.row_tokens:,} tokens x {shape.feature_size:,}",
        ),
    ]  # fmt: skip
    if place == place_of(sizes.topology.target[0]) and sizes.eval_tokens:
        cache = 2 * sizes.target_layers * keys * sizes.eval_tokens * e
        logits = shape.block_size * shape.vocab_size * (e + 4)
        how = f"2 x {sizes.target_layers} x {keys} x {sizes.eval_tokens:,} tokens x {e} + logits of a block"
        found.append(MemoryItem("evaluation", place, cache + logits, how))
    return found


def drafter_items(sizes: Sizes, place: str, replicas: int, *, with_frozen: bool) -> list[MemoryItem]:
    """What `replicas` drafter replicas keep at one place; `with_frozen`: the first target's embedding and head are
    there already."""
    weights, shape, e = sizes.drafter_weights, sizes.shape, sizes.itemsize
    state, how = optimizer_state(sizes)
    table = 2 * 4 * (sizes.row_tokens + shape.block_size) * shape.head_dim
    parts = [
        ("drafter weights", 4 * weights, f"4 x {weights:,}"),
        ("gradients", 4 * weights, f"4 x {weights:,}"),
        (f"{sizes.optimizer} state", state, how),
        ("rotary table", table, f"2 x 4 x {sizes.row_tokens + shape.block_size:,} positions x {shape.head_dim}"),
    ]
    if place != "host":
        parts.append(("bf16 weights", 2 * weights, f"2 x {weights:,}, autocast's copies"))
    if place != "host" and set(sizes.topology.target) != {place}:
        parts.append(("features of the row", sizes.row_bytes, f"{e} x {sizes.row_tokens:,} x {shape.feature_size:,}"))
    step = [activations(sizes), backward_scratch(sizes), attention_scratch(sizes), loss_scratch(sizes)]
    parts += step
    scratch, how = update_scratch(sizes)
    beyond = max(0, scratch - sum(nbytes for _, nbytes, _ in step))
    parts.append(("update, beyond the above", beyond, f"{how} - the step's four entries above"))
    times = f"{replicas} replicas x " if replicas > 1 else ""
    found = [
        MemoryItem(name, place, replicas * nbytes, f"{times}({how})" if times else how) for name, nbytes, how in parts
    ]
    if not with_frozen:
        frozen = 2 * shape.vocab_size * shape.hidden_size * e
        how = f"2 x {shape.vocab_size:,} x {shape.hidden_size:,} x {e}"
        found.append(MemoryItem("embedding and head", place, frozen, how))
    return found


def optimizer_state(sizes: Sizes) -> tuple[int, str]:
    """AdamW keeps two numbers per weight; Muon one per weight of a matrix."""
    weights, in_matrices = sizes.drafter_weights, sum(prod(m) for m in sizes.matrices)
    if sizes.optimizer == "muon":
        rest = weights - in_matrices
        return 4 * in_matrices + 8 * rest, f"4 x {in_matrices:,} + 8 x {rest:,}"
    return 8 * weights, f"8 x {weights:,}"


def update_scratch(sizes: Sizes) -> tuple[int, str]:
    """Between backward and the next row: the sum over replicas, then the optimizer's own temporaries."""
    weights, replicas = sizes.drafter_weights, len(sizes.topology.drafter)
    summed = 0 if replicas == 1 else 8 * weights if sizes.cuda else 4 * weights
    if sizes.optimizer == "muon":
        own = max(_newton_schulz(sizes, shape) for shape in set(sizes.matrices))
        return max(summed, own), f"max({summed:,}, Newton-Schulz of the largest shape {own:,})"
    own = 4 * weights if sizes.cuda else 2 * 4 * max(prod(m) for m in sizes.matrices)
    return max(summed, own), f"max({summed:,}, AdamW {own:,})"


def _newton_schulz(sizes: Sizes, shape: tuple[int, int]) -> int:
    """All matrices of one shape at once: gradients, their stack, three iterates and three Gram matrices."""
    together, small = sizes.matrices.count(shape), min(shape)
    c = 2 if sizes.cuda else 4
    return together * (2 * 4 * prod(shape) + 3 * c * prod(shape) + 3 * c * small * small)


def activations(sizes: Sizes) -> tuple[str, int, str]:
    """What a row's forward saves for its backward."""
    shape, (c, n) = sizes.shape, _bytes(sizes)
    layers, hidden, mlp = len(shape.layer_types), shape.hidden_size, shape.intermediate_size
    heads, kv_heads, dim = shape.num_attention_heads, shape.num_key_value_heads, shape.head_dim
    slots, tokens = sizes.row_slots, sizes.row_context
    per_slot = (2 * n + 2 * c) * hidden + 3 * c * mlp + ((n + 3 * c) * heads + (n + 2 * c) * kv_heads) * dim
    per_slot += 4 * (2 + 2 * heads + kv_heads)  # scales of the norms, log-sum-exp
    per_token = (n + 2 * c) * kv_heads * dim + 4 * kv_heads
    once = (n + 5 * c) * hidden * slots + (n + c) * hidden * tokens + 4 * (1 + 2 * dim) * (slots + tokens)
    how = f"({slots:,} slots x {per_slot:,} + {tokens:,} tokens x {per_token:,}) + {once:,}"
    if sizes.checkpointing == "layer":
        inputs = layers * c * hidden * slots
        nbytes = inputs + slots * per_slot + tokens * per_token + once
        return "activations", nbytes, f"{layers} layer inputs {inputs:,} + one layer {how}"
    nbytes = layers * (slots * per_slot + tokens * per_token) + once
    how = f"{layers} layers x {how}"
    return "activations", nbytes, how


def backward_scratch(sizes: Sizes) -> tuple[str, int, str]:
    """Gradients of one layer's activations, and the largest weight's gradient before it is added."""
    shape, (c, n) = sizes.shape, _bytes(sizes)
    slots = sizes.row_anchors * shape.block_size
    width = 3 * c * shape.intermediate_size + 3 * n * shape.hidden_size
    largest = max(prod(m) for m in sizes.matrices)
    return "backward", slots * width + 4 * largest, f"{slots:,} slots x {width:,} + 4 x {largest:,}"


def attention_scratch(sizes: Sizes) -> tuple[str, int, str]:
    """Blockwise: masks of the row's chunks, kept below a limit, and the concatenated keys and values of one chunk,
    both ways. Flex: the padded gradients of one layer and their unpadded parts, and tables of tiles and intervals."""
    shape, (c, _) = sizes.shape, _bytes(sizes)
    windows = len({shape.window(layer) for layer in range(len(shape.layer_types))})
    if sizes.attention == "flex":
        slots, keys = sizes.row_slots, sizes.row_slots + sizes.row_context
        width = shape.num_attention_heads * slots + 2 * shape.num_key_value_heads * keys
        tables = windows * 16 * (slots + slots * keys // TILE**2)
        how = f"2 x {c} x {width:,} x {shape.head_dim} + tables {tables:,}"
        return "attention gradients and tables", 2 * c * width * shape.head_dim + tables, how
    groups, keys = shape.num_attention_heads // shape.num_key_value_heads, shape.num_key_value_heads * shape.head_dim
    slots, chunk = sizes.row_slots, max(CHUNK_SLOTS, shape.block_size)
    masks = windows * min(KEPT_MASK_BYTES, c * groups * slots * (sizes.row_tokens + chunk))
    reach = sizes.row_tokens + chunk
    one = c * groups * chunk * reach
    pairs = 4 * c * reach * keys
    how = f"masks {masks:,} + one chunk's {one:,} + 4 x {c} x {reach:,} keys x {keys:,}"
    return "attention chunk and masks", masks + one + pairs, how


def loss_scratch(sizes: Sizes) -> tuple[str, int, str]:
    """Logits of one chunk of labels; in lower precision also before and after they are fp32."""
    vocab, e = sizes.shape.vocab_size, sizes.itemsize
    labels = min(chunk_labels(vocab), sizes.row_anchors * (sizes.shape.block_size - 1))
    each = 4 if e == 4 else 4 + 2 * e
    if sizes.shape.final_logit_softcapping:
        each += 8
    return "loss chunk", labels * vocab * each, f"{labels:,} labels x {vocab:,} x {each}"


def _bytes(sizes: Sizes) -> tuple[int, int]:
    """c and n."""
    return (2, 4) if sizes.cuda else (4, 4)


def _order(place: str) -> int:
    return -1 if place == "host" else int(place.partition(":")[2])


def totals(items: Sequence[MemoryItem]) -> dict[str, int]:
    """Bytes of each place."""
    found: dict[str, int] = {}
    for item in items:
        found[item.place] = found.get(item.place, 0) + item.nbytes
    return found
