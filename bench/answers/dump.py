# SPDX-License-Identifier: Apache-2.0
"""A cache of model.py as a kv-dump."""
import h5py
import numpy as np


def write_dump(path, model, ids, layers, positions, sequence="prompt", queries=None, gzip=None):
    """A kv-dump of these layers. positions: of the queries that it holds; queries [layers] where the layers' q are not of all tokens."""
    options = {} if gzip is None else {"compression": "gzip", "compression_opts": gzip, "shuffle": True}
    with h5py.File(path, "w", libver="v110") as f:
        f.attrs.update(format=np.bytes_("kv-dump"), format_version=1, num_layers=len(layers), num_q_heads=model.q_heads,
                       num_kv_heads=model.kv_heads, head_dim=model.head_dim, dtype=np.bytes_("float16"), rope_applied=1,
                       rope_theta=float(model.theta), rope_pairing=np.bytes_(model.rope.pairing), rope_dims=model.rope.dims,
                       sm_scale=model.sm_scale)
        f["rope_inv_freq"] = model.rope.inv_freq
        f[f"seq/{sequence}/tokens"] = np.asarray(ids, np.int32)
        f[f"seq/{sequence}"].attrs["kind"] = np.bytes_("text")
        for i, layer in enumerate(layers):
            group = f.create_group(f"seq/{sequence}/layer/{i}")
            q = layer.q[:, positions] if queries is None else queries[i]
            for name, x in (("k", layer.k), ("v", layer.v), ("q", q)):
                chunks = {"chunks": (1, min(256, x.shape[1]), x.shape[2])} if options else {}
                group.create_dataset(name, data=x.astype(np.float16), **chunks, **options)
            group["q_positions"], group["significance"] = np.asarray(positions, np.int32), layer.significance
