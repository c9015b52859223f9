"""RMSNorm for the decoder's sublayers and head."""

from __future__ import annotations

import torch
from torch import Tensor, nn


class RMSNorm(nn.RMSNorm):
    """torch's RMSNorm without its warning for different dtypes: under autocast a bfloat16 input meets a float32 weight.

    Such a pair is computed in the wider dtype and rounded once, to the input's.
    """

    def forward(self, x: Tensor) -> Tensor:
        if x.dtype == self.weight.dtype:
            return super().forward(x)
        wide = torch.promote_types(x.dtype, self.weight.dtype)
        normed = nn.functional.rms_norm(x.to(wide), self.normalized_shape, self.weight.to(wide), self.eps)
        return normed.to(x.dtype)
