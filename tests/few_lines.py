"""MLA in a few lines of torch, in float64, over whole keys: what a layer must give."""

import torch


def mla(weights, dims, hidden, *, scale, cos_sin=None, gate=False, restore=None, eps=1e-6):
    """Output `[T, H]` of one sequence, and each token's unquantized cache row `[T, L + R]`.

    `restore` takes those rows to what a cache gives back of them; all keys are read from there.
    """
    w = {name: torch.as_tensor(value).double() for name, value in weights.items()}
    x = torch.as_tensor(hidden).double()
    tokens, (N, L, P, R, V) = len(x), (dims.N, dims.L, dims.P, dims.R, dims.V)

    def norm(values, weight):
        return values * (values.pow(2).mean(-1, keepdim=True) + eps).rsqrt() * weight

    def rotate(values):  # [T, ..., R], pairs (2i, 2i + 1)
        if cos_sin is None:
            return values
        table = torch.tensor(cos_sin[:tokens]).double()
        turn = torch.complex(table[:, : R // 2], table[:, R // 2 :])
        turn = turn.reshape(tokens, *[1] * (values.ndim - 2), R // 2)
        pairs = torch.view_as_complex(values.reshape(*values.shape[:-1], R // 2, 2).contiguous())
        return torch.view_as_real(pairs * turn).reshape(values.shape)

    if dims.q_lora_rank is None:
        q = x @ w["q_proj.weight"].T
    else:
        q = norm(x @ w["q_a_proj.weight"].T, w["q_a_layernorm.weight"]) @ w["q_b_proj.weight"].T
    q = q.reshape(tokens, N, P + R)
    q = torch.cat([q[..., :P], rotate(q[..., P:])], -1) if R else q
    latent = x @ w["kv_a_proj_with_mqa.weight"].T
    rows = norm(latent[:, :L], w["kv_a_layernorm.weight"])
    rows = torch.cat([rows, rotate(latent[:, L:])], -1) if R else rows
    cached = rows if restore is None else torch.as_tensor(restore(rows.numpy())).double()
    kv = (cached[:, :L] @ w["kv_b_proj.weight"].T).reshape(tokens, N, P + V)
    k = torch.cat([kv[..., :P], cached[:, None, L:].expand(-1, N, -1)], -1)
    scores = torch.einsum("qnd,knd->nqk", q, k) * scale
    scores = scores.masked_fill(torch.ones(tokens, tokens).triu(1).bool(), float("-inf"))
    out = torch.einsum("nqk,knv->qnv", scores.softmax(-1), kv[..., P:]).reshape(tokens, N * V)
    if gate:
        out = out * torch.sigmoid(x @ w["g_proj.weight"].T)
    return (out @ w["o_proj.weight"].T).numpy(), rows.numpy()
