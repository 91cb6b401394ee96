# SPDX-License-Identifier: Apache-2.0
"""A Llama with random weights, and the caches that it runs over. PyTorch; on the CPU everything runs eagerly over a store in host memory."""
import math
from time import perf_counter

import torch
import torch.nn.functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

from budget import Shape, has_two_tiers
from rotation import rotate_and_split
from tierkv.errors import OutOfPagesError
from tierkv.kv_store import KvStore
from tierkv.prompt import significance

NO_MORE = 32  # tokens of a slot without a request, before they are forgotten


class Llama:
    def __init__(self, shape: Shape, device: str, max_tokens: int, seed: int = 1):
        self.shape, self.device = shape, device
        generator = torch.Generator(device).manual_seed(seed)

        def random(rows, columns, scale=1.0):
            return torch.empty(rows, columns, dtype=torch.bfloat16, device=device).normal_(std=scale / math.sqrt(columns), generator=generator)

        deep = 1 / math.sqrt(2 * shape.layers)
        q, kv = shape.q_heads * shape.head_dim, shape.kv_heads * shape.head_dim
        self.layers = [(random(q + 2 * kv, shape.hidden), random(shape.hidden, q, deep), random(2 * shape.intermediate, shape.hidden),
                        random(shape.hidden, shape.intermediate, deep)) for _ in range(shape.layers)]
        self.embedding = random(shape.vocabulary, shape.hidden) * math.sqrt(shape.hidden)
        self.head = random(shape.vocabulary, shape.hidden)
        angles = torch.arange(max_tokens + NO_MORE)[:, None] * torch.from_numpy(shape.rope().inv_freq)[None]
        self.cos, self.sin = (x.to(device, torch.bfloat16) for x in (angles.cos(), angles.sin()))

    def forward(self, ids, positions, attend):
        """The logits behind the last of ids [sequences, tokens]. attend(layer, q, k, v): [sequences, tokens, heads, head_dim] each, after RoPE."""
        s, (rows, tokens) = self.shape, ids.shape
        x = F.embedding(ids, self.embedding)
        for layer, (qkv, o, gate_up, down) in enumerate(self.layers):
            found = F.linear(F.rms_norm(x, (s.hidden,)), qkv).view(rows, tokens, s.q_heads + 2 * s.kv_heads, s.head_dim)
            seen = attend(layer, *rotate_and_split(found, positions, self.cos, self.sin, s.q_heads, s.kv_heads))
            x = x + F.linear(seen.reshape(rows, tokens, -1), o)
            gate, up = F.linear(F.rms_norm(x, (s.hidden,)), gate_up).chunk(2, -1)
            x = x + F.linear(F.silu(gate) * up, down)
        return F.linear(F.rms_norm(x[:, -1], (s.hidden,)), self.head)


def causal(q, k, v):
    out = F.scaled_dot_product_attention(q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2), is_causal=True, enable_gqa=True)
    return out.transpose(1, 2).contiguous()


def token_scores(q, k, stride=16):
    """Significances [kv_heads, tokens] of one prompt."""
    return significance(q, k, stride=stride) if q.is_cuda else torch.from_numpy(significance(q.float().numpy(), k.float().numpy(), stride=stride))


class StoreCache:
    """An engine of scheduler.py over a tierkv store. A captured step is one of all slots, or with capture_batches() of the next power of two;
    slots without a request fill it up with a few tokens."""

    def __init__(self, model: Llama, config, stream=None):
        self.model, self.stream = model, stream
        self.store = KvStore(config, stream=stream)
        self.slots = config.max_sequences
        self.ids = [self.store.add_sequence() for _ in range(self.slots)]
        self.tokens = torch.zeros(self.slots, dtype=torch.long, device=model.device)
        self.positions = torch.zeros(self.slots, dtype=torch.long, device=model.device)
        self.held = [0] * self.slots
        self.two_tiers = has_two_tiers(self.store.config)
        self.graph = None
        self.batches = []  # ascending
        self.notes_s = []

    # ---- prompts ----

    def prompt(self, slot, tokens):
        ids = torch.tensor([tokens], device=self.model.device)
        self.empty(slot)
        self.begin(slot, len(tokens))

        def attend(layer, q, k, v):
            out = causal(q, k, v)
            scores = token_scores(q[0], k[0])[None] if self.two_tiers else None
            self.store.append(self.ids[slot], layer, k, v, significance=scores)
            return out

        try:
            logits = self.model.forward(ids, torch.arange(len(tokens), device=self.model.device)[None], attend)
        except OutOfPagesError:
            self.clear(slot)
            raise
        token = int(logits[0].argmax())
        self.tokens[slot] = token
        return token

    def fill(self, slot, keys, values, scores, tokens, first_token):
        """The first `tokens` of a text whose keys and values [layers, tokens, kv_heads, head_dim] and significances [layers, kv_heads, tokens] are
        known."""
        self.empty(slot)
        self.begin(slot, tokens)
        try:
            for layer in range(self.model.shape.layers):
                given = scores[layer, None, :, :tokens].contiguous() if self.two_tiers else None
                self.store.append(self.ids[slot], layer, keys[layer, None, :tokens], values[layer, None, :tokens], significance=given)
        except OutOfPagesError:
            self.clear(slot)
            raise
        self.tokens[slot] = first_token

    def begin(self, slot, tokens):
        self.store.begin(self.ids[slot], tokens)
        self.held[slot] = tokens
        self.positions[slot] = tokens

    def empty(self, slot):
        if self.held[slot]:
            self.clear(slot)

    def clear(self, slot):
        self.store.truncate(self.ids[slot], 0)
        self.held[slot] = 0
        self.positions[slot] = 0

    # ---- steps ----

    def run(self, begins=True, attends=True, model=True):
        """A step of all slots, or of it what is not left out."""
        if begins:
            self.store.begin(self.ids, 1)

        def attend(layer, q, k, v):
            if begins:
                self.store.append(self.ids, layer, k, v)
            return self.store.attend(self.ids, layer, q, count_query=self.two_tiers).out if attends else q

        if model:
            logits = self.model.forward(self.tokens[:, None], self.positions[:, None], attend)
            self.tokens.copy_(logits.argmax(-1))
        else:
            s = self.model.shape
            q = torch.ones(self.slots, 1, s.q_heads, s.head_dim, dtype=torch.bfloat16, device=self.model.device)
            k = torch.ones(self.slots, 1, s.kv_heads, s.head_dim, dtype=torch.bfloat16, device=self.model.device)
            for layer in range(s.layers):
                attend(layer, q, k, k)
        if begins:
            self.positions.add_(1)
            self.held = [n + 1 for n in self.held]

    def capture(self):
        """The graph of a step. A store of coded rows must have its codebooks: a prompt of 256 tokens came before."""
        self.run()  # cuBLAS and the rotation settle what they need
        self.graph = Graph(self, self.run)

    def capture_batches(self):
        """A graph for each power of two below the number of slots, after capture()."""
        size = 1
        while size < self.slots:
            self.batches.append(Batch(self, size))
            size *= 2

    def launch(self):
        """OutOfPagesError: nothing has changed."""
        if self.graph is None:
            self.run()
        else:
            self.graph.launch()

    def step(self, slots):
        running = set(slots)
        idle = [slot for slot in range(self.slots) if slot not in running]
        for slot in idle:
            if self.held[slot] >= NO_MORE:
                self.clear(slot)
        batch = next((b for b in self.batches if b.size >= len(running)), None)
        if batch is None:
            self.launch()
        else:
            batch.launch([*slots, *idle[:batch.size - len(running)]])
        tokens = self.tokens.tolist()
        return [tokens[slot] for slot in slots]

    def close(self):
        self.graph, self.batches = None, []
        self.store.close()


class Batch:
    """A captured step of `size` slots, whichever they are."""

    def __init__(self, cache, size):
        self.cache, self.size = cache, size
        self.index = torch.arange(size, device=cache.model.device)
        self.run()
        self.graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(self.graph, stream=cache.stream, pool=cache.graph.graph.pool(), capture_error_mode="thread_local"):
            self.run()
        self.graph.replay()

    def run(self):
        c = self.cache
        ids = c.ids[:self.size]
        c.store.begin(ids, 1)

        def attend(layer, q, k, v):
            c.store.append(ids, layer, k, v)
            return c.store.attend(ids, layer, q, count_query=c.two_tiers).out

        logits = c.model.forward(c.tokens[self.index, None], c.positions[self.index, None], attend)
        c.tokens.index_copy_(0, self.index, logits.argmax(-1))
        c.positions.index_add_(0, self.index, torch.ones_like(self.index))
        for slot in range(self.size):
            c.held[slot] += 1

    def launch(self, slots):
        c = self.cache
        begin = perf_counter()
        c.store.note_replay([c.ids[slot] for slot in slots])
        c.notes_s.append(perf_counter() - begin)
        self.index.copy_(torch.tensor(slots).pin_memory(), non_blocking=True)
        self.graph.replay()
        for slot in slots:
            c.held[slot] += 1


class Graph:
    """A captured part of a step. The capture counts as made, so it is launched at once."""

    def __init__(self, cache, work, advances=True):
        self.cache, self.advances = cache, advances
        self.graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(self.graph, stream=cache.stream, capture_error_mode="thread_local"):
            work()
        self.graph.replay()

    def launch(self):
        if self.advances:
            begin = perf_counter()
            self.cache.store.note_replay(self.cache.ids)
            self.cache.notes_s.append(perf_counter() - begin)
            self.cache.held = [n + 1 for n in self.cache.held]
        self.graph.replay()


class DenseCache:
    """Keys and values of equally long sequences side by side, and PyTorch's attention without a mask over all of them: the fastest that PyTorch
    has. Positions that are not written yet are read as well, so that no step is cheaper than the last."""

    def __init__(self, model: Llama, sequences: int, begin_tokens: int, end_tokens: int, stream):
        s, self.model, self.slots, self.stream = model.shape, model, sequences, stream
        shape = (s.layers, sequences, s.kv_heads, end_tokens, s.head_dim)
        self.keys, self.values = (torch.zeros(shape, dtype=torch.bfloat16, device=model.device) for _ in range(2))
        self.tokens = torch.arange(sequences, device=model.device) % s.vocabulary
        self.at = torch.full((1,), begin_tokens, dtype=torch.long, device=model.device)
        self.graph = None
        self.backend = None

    def fill(self, keys, values, tokens):
        """[layers, tokens, kv_heads, head_dim], the same for all."""
        for cache, x in ((self.keys, keys), (self.values, values)):
            cache[:, :, :, :tokens] = x[:, :tokens].transpose(1, 2)[:, None]

    def run(self, attends=True):
        def attend(layer, q, k, v):
            for cache, x in ((self.keys, k), (self.values, v)):
                cache[layer].index_copy_(2, self.at, x.transpose(1, 2))
            if not attends:
                return q
            return self.attend(layer, q)

        logits = self.model.forward(self.tokens[:, None], self.at.expand(self.slots, 1).contiguous(), attend)
        self.tokens.copy_(logits.argmax(-1))
        self.at.add_(1)

    def attend(self, layer, q):
        def call():
            return F.scaled_dot_product_attention(q.transpose(1, 2), self.keys[layer], self.values[layer], enable_gqa=True).transpose(1, 2)
        if self.backend is None:
            return call()
        with sdpa_kernel(self.backend):
            return call()

    def choose_backend(self, milliseconds):
        """Takes the faster backend at this shape: cuDNN's or Flash."""
        s = self.model.shape
        q = torch.randn(self.slots, 1, s.q_heads, s.head_dim, dtype=torch.bfloat16, device=self.model.device)
        found = {}
        for backend in (SDPBackend.CUDNN_ATTENTION, SDPBackend.FLASH_ATTENTION):
            self.backend = backend
            try:
                self.attend(0, q)
                found[backend] = min(milliseconds(lambda: self.attend(0, q)) for _ in range(5))
            except RuntimeError:  # not for this shape
                continue
        self.backend = min(found, key=found.get) if found else None  # None: PyTorch's choice
        return {b.name: ms for b, ms in found.items()}
