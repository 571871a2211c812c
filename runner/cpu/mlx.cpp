/* Puts the kernels in front of MLX, on CPU streams.
 *
 * Loaded after libmlx.so with RTLD_GLOBAL, this library stands before it in the global scope, so mlx's Python module binds
 * to the functions exported here. Each looks whether the kernels can do the case. If so it returns an array with a
 * primitive of its own (`operation.h`), else it calls libmlx's function. The layout of arrays and primitives is that of
 * one exact version, so `kernels_use` compares versions before anything else; until it succeeds, every function calls
 * libmlx's. */
#include "attention.h"
#include "functions.h"
#include "products.h"

#define EXPORT __attribute__((visibility("default")))
#define TEXT_OF(NUMBER) #NUMBER
#define VERSION_TEXT(A, B, C) TEXT_OF(A) "." TEXT_OF(B) "." TEXT_OF(C)
#define MLX_WANTED VERSION_TEXT(MLX_VERSION_MAJOR, MLX_VERSION_MINOR, MLX_VERSION_PATCH)

namespace {

array function(int what, const array &x, mx::StreamOrDevice s) { return make(s, Elementwise{what}, mx::float32, {x}); }

template <typename Operation> const Operation *operation_of(const array &a) {
  auto *fast = a.has_primitive() ? dynamic_cast<const Fast<Operation> *>(&a.primitive()) : nullptr;
  return fast ? &fast->operation : nullptr;
}
bool is_function(const array &a, int what) {
  auto *function = operation_of<Elementwise>(a);
  return function && function->what == what && a.inputs().size() == 1;
}
const PackedProduct *product_of(const array &a) {
  auto *product = operation_of<PackedProduct>(a);
  return product && product->form == PackedProduct::PLAIN ? product : nullptr;
}
bool alike(const array &a, const array &b) { return a.dtype() == mx::float32 && b.dtype() == mx::float32 && a.shape() == b.shape(); }

/* x * sigmoid(x), silu(x) * y, and that of two products of the same rows, as one operation; nothing for anything else.
 * The operations that it replaces are computed only if something else asks for them. */
Maybe fused_product(const array &a, const array &b, mx::StreamOrDevice s) {
  if (!kernels || !alike(a, b)) return std::nullopt;
  if (is_function(b, SIGMOID) && b.inputs()[0].id() == a.id() && serves(s, a)) return function(SILU, a, s);
  if (!is_function(a, SILU) || !serves(s, a)) return std::nullopt;
  const array &gate = a.inputs()[0];
  auto *first = product_of(gate), *second = product_of(b);
  if (!first || !second || !(first->packing == second->packing) || first->asked != second->asked || gate.inputs()[0].id() != b.inputs()[0].id())
    return make(s, Elementwise{SILU}, mx::float32, {gate, b});
  Arrays inputs = gate.inputs();
  inputs.insert(inputs.end(), b.inputs().begin() + 1, b.inputs().end());
  return make(s, PackedProduct{first->packing, first->asked, PackedProduct::GATED}, mx::float32, std::move(inputs));
}

/* The sum of a product and a residual as one operation. */
Maybe fused_sum(const array &a, const array &b, mx::StreamOrDevice s) {
  if (!kernels || !alike(a, b) || !serves(s, a)) return std::nullopt;
  const array &product = product_of(b) ? b : a;
  if (!product_of(product)) return std::nullopt;
  Arrays inputs = product.inputs();
  inputs.push_back(&product == &a ? b : a);
  return make(s, PackedProduct{product_of(product)->packing, product_of(product)->asked, PackedProduct::ADDED}, mx::float32, std::move(inputs));
}

}  // namespace

/* --- What stands in front of libmlx */

namespace mlx::core {

namespace {

/* The product of matrices of x with packed ones, each axis before the last two broadcast to the other's. */
Maybe batched_product(const array &x, const array &w, const array &scales, const Maybe &biases, bool transpose, Packing packing, StreamOrDevice s) {
  if (w.ndim() < 3 || x.ndim() < 2 || std::max(x.ndim(), w.ndim()) > MOST_AXES || x.dtype() != float32 || (packing.mode == AFFINE && scales.dtype() != float32) || w.size() == 0) return std::nullopt;
  const size_t k = (size_t)scales.shape(-1) * packing.group;
  if (!packing.fits(w, scales, biases, k) || (size_t)x.shape(-1) != (transpose ? k : w.shape(-2)) || !serves(s, x)) return std::nullopt;
  Arrays inputs = {x, w, scales};
  if (biases) inputs.push_back(*biases);
  return make(s, BatchedProduct{packing, transpose}, float32, std::move(inputs));
}

}  // namespace

EXPORT array quantized_matmul(const array &x, const array &w, const array &scales, const Maybe &biases, bool transpose, std::optional<int> group_size,
                              std::optional<int> bits, const std::string &mode, StreamOrDevice s) {
  auto packing = kernels ? Packing::of(group_size, bits, mode) : std::nullopt;
  auto batched = packing ? batched_product(x, w, scales, biases, transpose, *packing, s) : std::nullopt;
  if (batched) return *batched;
  if (!packing || !transpose || x.ndim() < 1 || x.ndim() > MOST_AXES || w.ndim() != 2 || !is_float(x) || !packing->fits(w, scales, biases, x.shape(-1)) ||
      !serves(s, x))
    return own_quantized_matmul(x, w, scales, biases, transpose, group_size, bits, mode, s);
  Arrays inputs = {x, w, scales};
  if (biases) inputs.push_back(*biases);
  return make(s, PackedProduct{*packing, asked_of(x)}, packing->mode == AFFINE ? promote_types(x.dtype(), scales.dtype()) : x.dtype(), std::move(inputs));
}

EXPORT array gather_qmm(const array &x, const array &w, const array &scales, const Maybe &biases, Maybe lhs_indices, Maybe rhs_indices, bool transpose,
                        std::optional<int> group_size, std::optional<int> bits, const std::string &mode, const Maybe &global_scale, bool sorted_indices,
                        StreamOrDevice s) {
  auto packing = kernels ? Packing::of(group_size, bits, mode) : std::nullopt;
  if (!packing || !transpose || lhs_indices || !rhs_indices || rhs_indices->dtype() != uint32 || global_scale || x.ndim() < 2 || rhs_indices->ndim() + 2 > MOST_AXES ||
      x.ndim() > MOST_AXES || w.ndim() != 3 || !is_float(x) || !packing->fits(w, scales, biases, x.shape(-1)) ||
      rhs_indices->size() == 0 || !serves(s, x))
    return own_gather_qmm(x, w, scales, biases, lhs_indices, rhs_indices, transpose, group_size, bits, mode, global_scale, sorted_indices, s);
  auto batch = x.shape();
  batch.resize(batch.size() - 2);
  batch = broadcast_shapes(batch, rhs_indices->shape());
  Arrays inputs = {x, w, scales, batch == rhs_indices->shape() ? *rhs_indices : broadcast_to(*rhs_indices, batch, s)};
  if (biases) inputs.push_back(*biases);
  return make(s, ExpertProduct{*packing}, packing->mode == AFFINE ? promote_types(x.dtype(), scales.dtype()) : x.dtype(), std::move(inputs));
}

EXPORT array dequantize(const array &w, const array &scales, const Maybe &biases, std::optional<int> group_size, std::optional<int> bits,
                        const std::string &mode, const Maybe &global_scale, std::optional<Dtype> dtype, StreamOrDevice s) {
  auto packing = kernels ? Packing::of(group_size, bits, mode) : std::nullopt;
  auto type = dtype.value_or(packing && packing->mode == AFFINE ? scales.dtype() : bfloat16);
  if (!packing || global_scale || type_of(type) < F32 || type_of(type) > BF16 || w.ndim() < 2 || scales.ndim() < 1 ||
      !packing->fits(w, scales, biases, (size_t)scales.shape(-1) * packing->group) || !serves(s, w))
    return own_dequantize(w, scales, biases, group_size, bits, mode, global_scale, dtype, s);
  Arrays inputs = {w, scales};
  if (biases) inputs.push_back(*biases);
  return make(s, UnpackedRows{*packing, type}, type, std::move(inputs));
}

EXPORT array sigmoid(const array &x, StreamOrDevice s) {
  return kernels && x.dtype() == float32 && serves(s, x) ? function(SIGMOID, x, s) : own_sigmoid(x, s);
}
EXPORT array tanh(const array &x, StreamOrDevice s) {
  return kernels && x.dtype() == float32 && serves(s, x) ? function(TANH, x, s) : own_tanh(x, s);
}
EXPORT array exp(const array &x, StreamOrDevice s) {
  return kernels && x.dtype() == float32 && serves(s, x) ? function(EXP, x, s) : own_exp(x, s);
}
EXPORT array multiply(const array &a, const array &b, StreamOrDevice s) {
  auto fused = fused_product(a, b, s);
  return fused ? *fused : own_multiply(a, b, s);
}
EXPORT array add(const array &a, const array &b, StreamOrDevice s) {
  auto fused = fused_sum(a, b, s);
  return fused ? *fused : own_add(a, b, s);
}
EXPORT array concatenate(std::vector<array> arrays, int axis, StreamOrDevice s) {
  const int ndim = arrays.empty() ? 0 : (int)arrays[0].ndim(), along = axis < 0 ? axis + ndim : axis;
  bool fits = kernels && ndim >= 1 && ndim <= MOST_AXES && along >= 0 && along < ndim;
  size_t bytes = 0;
  for (size_t i = 0; fits && i < arrays.size(); bytes += arrays[i++].nbytes()) {
    auto shape = arrays[i].shape();
    if ((int)shape.size() == ndim) shape[along] = arrays[0].shape(along);
    fits = shape == arrays[0].shape() && arrays[i].dtype() == arrays[0].dtype() && serves(s, arrays[i]);
  }
  if (!fits || arrays.size() < 2 || bytes < WORTH_JOINING) return own_concatenate(std::move(arrays), axis, s);
  const Dtype type = arrays[0].dtype();
  return make(s, Joined{along}, type, std::move(arrays));
}
EXPORT array softmax(const array &x, const std::vector<int> &axes, bool precise, StreamOrDevice s) {
  bool fits = kernels && x.dtype() == float32 && x.ndim() >= 1 && x.ndim() <= MOST_AXES && axes.size() == 1 && (axes[0] == -1 || axes[0] + 1 == (int)x.ndim()) && serves(s, x);
  return fits ? make(s, RowSoftmax{}, float32, {x}) : own_softmax(x, axes, precise, s);
}

namespace fast {

EXPORT array rms_norm(const array &x, const Maybe &weight, float eps, StreamOrDevice s) {
  if (!kernels || x.ndim() < 1 || x.ndim() > MOST_AXES || !is_float(x) || (weight && (weight->ndim() != 1 || !is_float(*weight) || weight->shape(0) != x.shape(-1))) || !serves(s, x))
    return own_rms_norm(x, weight, eps, s);
  Arrays inputs = {x};
  if (weight) inputs.push_back(*weight);
  return make(s, NormedRows{eps}, weight ? result_type(x, *weight) : x.dtype(), std::move(inputs));
}

EXPORT array rope(const array &x, int dims, bool traditional, std::optional<float> base, float scale, const array &offset, const Maybe &freqs, StreamOrDevice s) {
  if (!kernels || x.ndim() < 3 || x.ndim() > 4 || !is_float(x) || dims <= 0 || dims % 2 || dims > x.shape(-1) || offset.dtype() != int32 || offset.ndim() > 1 ||
      (offset.size() != 1 && offset.shape(0) != x.shape(0)) || freqs.has_value() == base.has_value() ||
      (freqs && (freqs->dtype() != float32 || freqs->ndim() != 1 || freqs->shape(0) != dims / 2)) || !serves(s, x))
    return own_rope(x, dims, traditional, base, scale, offset, freqs, s);
  Arrays inputs = {x, offset};
  if (freqs) inputs.push_back(*freqs);
  return make(s, TurnedRows{dims, traditional, base.has_value(), base.value_or(0), scale}, x.dtype(), std::move(inputs));
}
EXPORT array rope(const array &x, int dims, bool traditional, std::optional<float> base, float scale, int offset, const Maybe &freqs, StreamOrDevice s) {
  return rope(x, dims, traditional, base, scale, array(offset, int32), freqs, s);
}

EXPORT array scaled_dot_product_attention(const array &q, const array &k, const array &v, const float scale, const std::string &mode, Maybe mask,
                                          const Maybe &sinks, bool force_fused, StreamOrDevice s) {
  bool fits = kernels && q.ndim() == 4 && k.ndim() == 4 && v.ndim() == 4 && is_float(q) && k.dtype() == q.dtype() && v.dtype() == q.dtype() && k.size() > 0 && v.size() > 0 &&
              q.shape(0) == k.shape(0) && q.shape(0) == v.shape(0) && k.shape(1) == v.shape(1) && k.shape(2) == v.shape(2) && q.shape(3) == k.shape(3) &&
              q.shape(1) % k.shape(1) == 0 && (mode == "" || mode == "array" || (mode == "causal" && !mask && k.shape(2) >= q.shape(2))) &&
              (!mask || (mask->ndim() <= 4 && (mask->dtype() == q.dtype() || mask->dtype() == bool_))) &&
              (!sinks || (sinks->dtype() == q.dtype() && sinks->ndim() == 1 && sinks->shape(0) == q.shape(1))) && serves(s, q);
  if (!fits) return own_attention(q, k, v, scale, mode, mask, sinks, force_fused, s);
  Arrays inputs = {q, k, v};
  if (mask) {
    auto shape = q.shape();
    shape.back() = k.shape(2);
    inputs.push_back(mask->shape() == shape ? *mask : broadcast_to(*mask, shape, s));
  }
  if (sinks) inputs.push_back(*sinks);
  const bool rounds = asked && q.shape(0) == asked->batch && q.shape(2) == asked->length;
  return make(s, FusedAttention{scale, mode == "causal" && q.shape(2) > 1, mask.has_value(), sinks.has_value(), mode == "" && !mask ? oldest_of(k) : 0, rounds ? asked : nullptr}, q.dtype(), std::move(inputs));
}

}  // namespace fast
}  // namespace mlx::core

/* True if this library was built for the MLX in this process. Nothing else here may be used before. */
extern "C" EXPORT int kernels_fit() { return all_found && std::string(mx::version()) == MLX_WANTED; }

/* The kernels with the widest vectors of at most `width` float32 numbers that this processor has; nullptr if none. */
static const Kernels *widest(int width) {
#ifdef __x86_64__
  __builtin_cpu_init();
  bool has_avx512 = __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl") &&
                    __builtin_cpu_supports("avx512vnni");
  if (width >= 16 && has_avx512) return &kernels_avx512;
  if (width >= 8 && __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && __builtin_cpu_supports("f16c")) return &kernels_avx2;
  return nullptr;
#else
  return width >= 4 ? &kernels_neon : nullptr;
#endif
}

/* The width of the widest vectors, of at most `width` float32 numbers, that this processor has; 0 if none. */
extern "C" EXPORT int kernels_width(int width) { return widest(width) ? widest(width)->width : 0; }

/* Puts the kernels with the widest vectors of at most `width` float32 numbers in front of MLX, MLX's own if there are none;
 * `many` and `few` are the numbers of threads for products of many and of few rows. Returns the kernels. */
extern "C" EXPORT const Kernels *kernels_use(int width, share_fn sharing, int for_many, int for_few) {
  kernels = widest(width);
  share = sharing;
  many = for_many;
  few = for_few;
  return kernels;
}

/* Says which tokens of a forward [batch, length] are asked for in what this thread builds from now on: the first `counts`
 * of each row; all if batch is 0. */
extern "C" EXPORT void kernels_ask(int batch, int length, const int *counts) {
  asked = nullptr;
  if (!batch) return;
  auto some = std::make_shared<Asked>(Asked{batch, length, {counts, counts + batch}, {}});
  for (int row = 0; row < batch; row++)
    for (int i = 0; i < counts[row]; i++) some->rows.push_back(row * length + i);
  asked = some;
}

/* The number of operations that kernels computed so far. */
extern "C" EXPORT int64_t kernels_calls() { return calls; }
