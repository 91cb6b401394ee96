# SPDX-License-Identifier: Apache-2.0
"""RoPE of queries and keys, and the three parts of a projection: one Triton kernel on a GPU, PyTorch elsewhere."""
import torch

try:
    import triton
    import triton.language as tl
except ImportError:
    triton = None


def reference(qkv, positions, cos, sin, q_heads, kv_heads):
    """q, k, v [sequences, tokens, heads, head_dim], dense, of qkv [sequences, tokens, q_heads + 2 kv_heads, head_dim]. The first half of the
    channels turns with the second."""
    turned, v = qkv[:, :, :q_heads + kv_heads].float(), qkv[:, :, q_heads + kv_heads:]
    c, s = (table[positions][:, :, None].float() for table in (cos, sin))
    a, b = turned.chunk(2, -1)
    turned = torch.cat((a * c - b * s, b * c + a * s), -1).to(qkv.dtype)
    return turned[:, :, :q_heads].contiguous(), turned[:, :, q_heads:].contiguous(), v.contiguous()


if triton is not None:
    @triton.jit
    def rotate_kernel(qkv, positions, cos, sin, q, k, v, q_heads, kv_heads, HALF: tl.constexpr):
        """A program a token and head."""
        row = tl.program_id(0).to(tl.int64)
        head = tl.program_id(1)
        i = tl.arange(0, HALF)
        source = qkv + (row * (q_heads + 2 * kv_heads) + head) * (2 * HALF)
        a, b = tl.load(source + i), tl.load(source + HALF + i)
        if head < q_heads + kv_heads:
            at = tl.load(positions + row) * HALF + i
            c, s = tl.load(cos + at).to(tl.float32), tl.load(sin + at).to(tl.float32)
            x, y = a.to(tl.float32), b.to(tl.float32)
            first, second = (x * c - y * s).to(a.dtype), (y * c + x * s).to(a.dtype)
            if head < q_heads:
                target = q + (row * q_heads + head) * (2 * HALF)
            else:
                target = k + (row * kv_heads + head - q_heads) * (2 * HALF)
            tl.store(target + i, first)
            tl.store(target + HALF + i, second)
        else:
            target = v + (row * kv_heads + head - q_heads - kv_heads) * (2 * HALF)
            tl.store(target + i, a)
            tl.store(target + HALF + i, b)


def rotate_and_split(qkv, positions, cos, sin, q_heads, kv_heads):
    if triton is None or not qkv.is_cuda:
        return reference(qkv, positions, cos, sin, q_heads, kv_heads)
    rows, tokens, _, head_dim = qkv.shape
    q, k, v = (qkv.new_empty(rows, tokens, heads, head_dim) for heads in (q_heads, kv_heads, kv_heads))
    rotate_kernel[(rows * tokens, q_heads + 2 * kv_heads)](qkv.contiguous(), positions.contiguous(), cos, sin, q, k, v, q_heads, kv_heads,
                                                          HALF=head_dim // 2)
    return q, k, v
