"""Flow attention: what flows into a query and out of a key is conserved."""

from typing import ClassVar

from torch import Tensor

from scanvas.kernels.dispatch import outside_autocast

from .kernel import AffineMixer, full
from .sums import mean_one


@outside_autocast
def flow_features(
    q: Tensor, k: Tensor, eps: float, weight: Tensor | None = None
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """``φ(q)``, ``φ(k)``, each key's share ``N softmax_j(Ô)`` and ``σ(Î) / I``, ``(B, N, H, ·)``. ``weight`` ``(B or 1,
    N)``: how much of each token, as a query and as a key, is in the sums."""
    q, k = full(q).sigmoid(), full(k).sigmoid()

    def there(z: Tensor) -> Tensor:
        return z if weight is None else z * full(weight)[..., None, None]

    incoming = (q * there(k).sum(1, keepdim=True)).sum(-1, keepdim=True) + eps
    outgoing = (k * there(q).sum(1, keepdim=True)).sum(-1, keepdim=True) + eps
    # Each flow once more, where the other's has been made one.
    sink = (q * there(k / outgoing).sum(1, keepdim=True)).sum(-1, keepdim=True)
    source = (k * there(q / incoming).sum(1, keepdim=True)).sum(-1, keepdim=True).clamp(-1, 1)
    return q, k, mean_one(source, weight), sink.sigmoid() / incoming


class FlowAttention(AffineMixer):
    """``y_i = σ(Î_i) ⊙ φ(q_i) (Σ_j φ(k_j)ᵀ v'_j) / I_i``, ``v'_j = N softmax_j(Ô) v_j``, ``φ = σ``; ``O(N)`` in time.

    Flowformer (arXiv:2202.06258): incoming flow ``I_i = φ(q_i)·Σ_j φ(k_j)``, outgoing flow ``O_j = φ(k_j)·Σ_i φ(q_i)``,
    and both when the other is conserved, ``Î_i = φ(q_i)·Σ_j φ(k_j)/O_j``, ``Ô_j = φ(k_j)·Σ_i φ(q_i)/I_i`` (between -1
    and 1). Sources compete, which makes attention selective without a softmax over pairs. Three global sums; rows of
    the map sum to about ``σ(Î_i)``. Neither positions nor convolutions.

    Args:
        dim, num_heads, fused_projections: see ``TokenMixer``.
        qkv_bias: biases in the projections, the output's too.
        eps: added to I and O.
        proj_drop: dropout after the output projection.
    """

    paper: ClassVar[str] = "https://arxiv.org/abs/2202.06258"

    def __init__(
        self,
        dim: int,
        num_heads: int,
        *,
        fused_projections: bool = False,
        qkv_bias: bool = True,
        eps: float = 1e-6,
        proj_drop: float = 0.0,
        device=None,
        dtype=None,
    ):
        super().__init__(dim, num_heads, fused_projections=fused_projections)
        self.eps = eps
        self.make_projections(dim, dim, bias=qkv_bias, proj_drop=proj_drop, device=device, dtype=dtype)

    def features(self, q: Tensor, k: Tensor, grid: tuple[int, int], prefix: int) -> tuple[Tensor, ...]:
        q, k, share, row = flow_features(q, k, self.eps)
        return q, k * share, row
