"""Operations that the device lacks or does badly, written in other ones.

| file | its idea |
| --- | --- |
| `kernels` | take the place of PyTorch's own while a step is traced |
| `products`, `attention`, `norms`, `classes` | the kernels |
| `multihead` | `nn.MultiheadAttention`, whose Python has to be another too |
| `flattened` | rows that were flattened for a product |
| `words` | embeddings, whose Python has to be another too |
| `residuals` | results that are kept where the rest is computed again |
| `magnitude` | the absolute value of complex numbers |
| `dtypes` | dtypes that PyTorch refuses in one operation, and torch_xla doesn't |
| `views` | the same elements straight from the tensor that a view is of |
| `indices` | indices of 32 bits, where several cores share rows |
| `linear_algebra` | orthogonal matrices, from products and triangular systems |
| `lowerings` | which operations the device has, and a few that it lacks or that end the process |
"""
