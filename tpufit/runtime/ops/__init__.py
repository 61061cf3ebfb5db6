"""Operations that the device lacks or computes slowly, reformulated with other operations.

| file | content |
| --- | --- |
| `kernels` | replaces PyTorch's kernels while a step is traced |
| `products`, `attention`, `norms`, `cross_entropy`, `dropout` | the kernels |
| `attention_choice` | decides which attention the flash kernel computes, and says why not |
| `flash` | attention by JAX's kernel for TPUs |
| `masks` | derives the pattern of an attention mask from its construction |
| `multihead` | replaces the Python of `nn.MultiheadAttention` |
| `encoder` | padding of `nn.TransformerEncoder` in evaluation |
| `addmm` | rows that were flattened for a product |
| `embedding` | replaces the Python of embeddings |
| `residuals` | results that are kept where the rest is recomputed |
| `reductions` | counts, norms and pairwise distances, where torch_xla's results differ from PyTorch's |
| `ordering` | maxima, minima and sorting of NaN and infinity |
| `rrelu` | `nn.RReLU` |
| `resizing` | images resized by a factor that gives a fractional number of rows |
| `derivatives` | second derivatives of operations for which the device has only first ones |
| `native` | PyTorch's operations by name, and kernels that call them |
| `dtypes` | combinations of dtypes that PyTorch refuses and torch_xla accepts |
| `views` | reads the elements of a view directly from its base |
| `linear_algebra` | orthogonal matrices, computed by products and triangular solves |
| `lowerings` | lists the device's operations, and adds a few that it lacks or that crash the process |
"""
