/* Puts the kernels in front of MLX, on CPU streams.
 *
 * Loaded after libmlx.so with RTLD_GLOBAL, this library stands before it in the global scope, so mlx's Python module binds
 * to the functions exported here. Each looks whether the kernels can do the case. If so it returns an array with a
 * primitive of its own (`operation.h`), else it calls libmlx's function. The layout of arrays and primitives is that of
 * one exact version, so `kernels_use` compares versions before anything else; until it succeeds, every function calls
 * libmlx's. */
#include "attention.h"
#include "convolutions.h"
#include "experts.h"
#include "functions.h"
#include "recurrences.h"

#define EXPORT __attribute__((visibility("default")))
#define TEXT_OF(NUMBER) #NUMBER
#define VERSION_TEXT(A, B, C) TEXT_OF(A) "." TEXT_OF(B) "." TEXT_OF(C)
#define MLX_WANTED VERSION_TEXT(MLX_VERSION_MAJOR, MLX_VERSION_MINOR, MLX_VERSION_PATCH)

namespace {

template <typename Operation> const Operation *operation_of(const array &a) {
  auto *fast = a.has_primitive() ? dynamic_cast<const Fast<Operation> *>(&a.primitive()) : nullptr;
  return fast ? &fast->operation : nullptr;
}
const PackedProduct *product_of(const array &a) {
  auto *product = operation_of<PackedProduct>(a);
  return product && product->form == PackedProduct::PLAIN ? product : nullptr;
}
/* That of experts, of each chosen one by itself. */
const ExpertProduct *experts_of(const array &a) {
  auto *product = operation_of<ExpertProduct>(a);
  return product && product->form == ExpertProduct::EACH && !product->gated ? product : nullptr;
}
/* The first input of a primitive of libmlx's with this name; nullptr for any other array. */
const array *input_of(const array &a, const char *name) { return a.has_primitive() && !strcmp(a.primitive().name(), name) ? &a.inputs()[0] : nullptr; }
bool alike(const array &a, const array &b) { return a.dtype() == mx::float32 && b.dtype() == mx::float32 && a.shape() == b.shape(); }

/* The one number of an array that is known while a graph is built, and that has no more axes than `other`. */
std::optional<float> constant_of(const array &a, const array &other) {
  if (a.size() != 1 || a.ndim() > other.ndim() || a.dtype() != mx::float32 || a.has_primitive() || a.is_tracer() || !a.is_available()) return std::nullopt;
  return *a.data<float>();
}

/* An array as a function of another one, or of itself: operations on single numbers are joined while a graph is built, and
 * those in between are computed only if something else asks for them. */
struct Function {
  array x;
  Formula formula{};

  static Function of(const array &a) {
    auto *known = operation_of<Elementwise>(a);
    return known && a.inputs().size() == 1 ? Function{a.inputs()[0], known->formula} : Function{a};
  }
  int last() const { return formula.count; }
  /* The place of what a step makes, which is taken once; 0 if there is no room for it. */
  int take(Step step) {
    if ((step.what == ADD || step.what == MULTIPLY) && step.first > step.second) std::swap(step.first, step.second);
    for (int i = 0; i < formula.count; i++)
      if (formula.steps[i] == step) return i + 1;
    if (formula.count == MOST_STEPS) return 0;
    formula.steps[formula.count++] = step;
    return formula.count;
  }
  /* Takes the steps of another function of the same array: the place of its result; nothing if there is no room. */
  std::optional<int> take(const Function &other) {
    int places[MOST_STEPS + 1] = {0};
    for (int i = 0; i < other.formula.count; i++) {
      Step step = other.formula.steps[i];
      if (step.first != CONSTANT) step.first = places[step.first];
      if (step.second != CONSTANT) step.second = places[step.second];
      if (!(places[i + 1] = take(step))) return std::nullopt;
    }
    return places[other.formula.count];
  }
  array result(mx::StreamOrDevice s, const Maybe &factor = std::nullopt) const {
    Arrays inputs = {x};
    if (factor) inputs.push_back(*factor);
    return make(s, Elementwise{formula}, mx::float32, std::move(inputs));
  }
};

/* A function of `a` and of a constant, the first of the two unless `turned`. */
Maybe with_constant(int what, const array &a, float constant, bool turned, mx::StreamOrDevice s) {
  if (a.dtype() != mx::float32 || !serves(s, a)) return std::nullopt;
  Function f = Function::of(a);
  if (f.last() == MOST_STEPS) f = {a};
  return f.take(turned ? Step{what, CONSTANT, f.last(), constant} : Step{what, f.last(), CONSTANT, constant}) == f.last() ? Maybe(f.result(s)) : std::nullopt;
}

/* A function of one array, for two that are functions of it, or of an array and a constant; nothing for anything else. */
Maybe function(int what, const array &a, const array &b, mx::StreamOrDevice s) {
  if (!kernels) return std::nullopt;
  if (auto constant = constant_of(b, a)) return with_constant(what, a, *constant, false, s);
  if (auto constant = constant_of(a, b)) return with_constant(what, b, *constant, true, s);
  if (!alike(a, b) || !serves(s, a)) return std::nullopt;
  Function f = Function::of(a), g = Function::of(b);
  if (f.x.id() == b.id()) g = {b};
  if (g.x.id() == a.id()) f = {a};
  if (f.x.id() != g.x.id()) return std::nullopt;
  const int first = f.last();
  auto second = f.take(g);
  return second && f.take({what, first, *second, 0}) == f.last() ? Maybe(f.result(s)) : std::nullopt;
}
Maybe function(int what, const array &a, mx::StreamOrDevice s) { return kernels ? with_constant(what, a, 0, false, s) : std::nullopt; }

/* The inputs of an operation that is made of two: of the second one, without the first `common` ones. */
Arrays joined(Arrays first, const Arrays &second, size_t common = 0) {
  first.insert(first.end(), second.begin() + common, second.end());
  return first;
}

/* The norms of `rows` times a number; nothing for anything else. */
Maybe scaled_norm(const array &number, const array &rows, mx::StreamOrDevice s) {
  auto *norm = operation_of<NormedRows>(rows);
  const auto factor = constant_of(number, rows);
  if (!factor || !norm || !norm->plain() || rows.dtype() != mx::float32 || !serves(s, rows)) return std::nullopt;
  NormedRows scaled = *norm;
  scaled.factor = *factor;
  return make(s, std::move(scaled), mx::float32, rows.inputs());
}

/* silu of a convolution as a part of it; nothing for any other function. */
Maybe activated(const Maybe &function, mx::StreamOrDevice s) {
  static const Formula silu{2, {{SIGMOID, 0, CONSTANT, 0}, {MULTIPLY, 0, 1, 0}}};
  if (!function || !(operation_of<Elementwise>(*function)->formula == silu)) return std::nullopt;
  const array &x = function->inputs()[0];
  auto *convolved = operation_of<Convolved>(x);
  if (!convolved || convolved->silu) return std::nullopt;
  return make(s, Convolved{convolved->dilation, convolved->parts, convolved->biased, true}, mx::float32, x.inputs());
}

/* The product of a function and another array, of a function and norms, or of that of a product of rows and another
 * product of them; nothing for anything else. */
Maybe gated(const array &a, const array &b, mx::StreamOrDevice s) {
  if (!kernels || !alike(a, b) || !serves(s, a)) return std::nullopt;
  const Function f = Function::of(a), g = Function::of(b);
  if (f.last() < g.last()) return gated(b, a, s);
  if (!f.last()) return std::nullopt;
  if (auto *norm = operation_of<NormedRows>(b); norm && norm->plain()) {
    NormedRows times = *norm;
    times.gate = f.formula;
    Arrays inputs = b.inputs();
    inputs.push_back(f.x);
    return make(s, std::move(times), mx::float32, std::move(inputs));
  }
  const Gate gate{f.formula, g.formula};
  if (auto *first = product_of(f.x), *second = product_of(g.x); first && second && *first == *second && !first->biased && f.x.inputs()[0].id() == g.x.inputs()[0].id())
    return make(s, PackedProduct{first->packing, first->asked, PackedProduct::GATED, false, gate}, mx::float32, joined(f.x.inputs(), g.x.inputs(), 1));
  if (auto *first = experts_of(f.x), *second = experts_of(g.x); first && second && *first == *second && f.x.inputs()[0].id() == g.x.inputs()[0].id() && f.x.inputs()[1].id() == g.x.inputs()[1].id())
    return make(s, ExpertProduct{first->packing, first->of_rows, first->biased, ExpertProduct::EACH, true, gate}, mx::float32, joined(f.x.inputs(), g.x.inputs(), 2));
  return f.result(s, b);
}

/* The bias of each token's experts, added to their products; nothing for anything else. */
Maybe biased_experts(const array &a, const array &b, mx::StreamOrDevice s) {
  auto *product = experts_of(a);
  const array *squeezed = input_of(b, "ExpandDims"), *gathered = squeezed ? input_of(*squeezed, "Squeeze") : nullptr, *bias = gathered ? input_of(*gathered, "Gather") : nullptr;
  if (!product || product->biased || !bias || !alike(a, b) || bias->ndim() != 2 || bias->shape(1) != a.shape(-1) || gathered->inputs()[1].id() != a.inputs()[1].id() || !serves(s, a))
    return std::nullopt;
  ExpertProduct fused = *product;
  fused.biased = true;
  return make(s, std::move(fused), mx::float32, joined(a.inputs(), {*bias}));
}

/* The sum of a token's experts, and of what is added to it; nothing for anything else. */
Maybe experts_and(const array &sum, const array &other, mx::StreamOrDevice s) {
  auto *experts = operation_of<ExpertProduct>(sum);
  if (!experts || experts->form != ExpertProduct::SUMMED || product_of(other) || !alike(sum, other) || !serves(s, sum)) return std::nullopt;
  ExpertProduct fused = *experts;
  fused.form = ExpertProduct::ADDED;
  return make(s, std::move(fused), mx::float32, joined(sum.inputs(), {other}));
}
/* Those, with those of a shared expert, and a residual, which is added to the former; nothing for anything else. */
Maybe all_experts_and(const array &sum, const array &other, mx::StreamOrDevice s) {
  auto *shared = operation_of<PackedProduct>(sum);
  auto *scaled = operation_of<ScaledRows>(sum);
  const bool fits = shared ? shared->form == PackedProduct::ADDED : scaled && sum.inputs().size() > 2;
  const auto both = fits ? experts_and(sum.inputs().back(), other, s) : std::nullopt;
  if (!both) return std::nullopt;
  Arrays inputs = sum.inputs();
  inputs.back() = *both;
  return shared ? make(s, PackedProduct(*shared), mx::float32, std::move(inputs)) : make(s, ScaledRows(*scaled), mx::float32, std::move(inputs));
}

/* Rows times a function of a number of each; or what is added to those. Nothing for anything else. */
Maybe scaled_rows(const array &numbers, const array &rows, mx::StreamOrDevice s) {
  auto shape = rows.shape();
  if (rows.ndim() < 1 || rows.ndim() > MOST_AXES || rows.dtype() != mx::float32 || !serves(s, rows)) return std::nullopt;
  shape.back() = 1;
  const Function f = Function::of(numbers);
  return f.last() && numbers.shape() == shape && rows.shape() != shape ? Maybe(make(s, ScaledRows{f.formula}, mx::float32, {rows, f.x})) : std::nullopt;
}
Maybe scaled_rows_and(const array &scaled, const array &other, mx::StreamOrDevice s) {
  auto *rows = operation_of<ScaledRows>(scaled);
  return rows && scaled.inputs().size() == 2 && alike(scaled, other) && serves(s, scaled) ? Maybe(make(s, ScaledRows(*rows), mx::float32, joined(scaled.inputs(), {other}))) : std::nullopt;
}

/* The results of a token's experts, each times its weight; nothing for anything else. */
Maybe weighted_experts(const array &rows, const array &weights, mx::StreamOrDevice s) {
  const array *each = input_of(rows, "Squeeze"), *numbers = input_of(weights, "ExpandDims");
  auto *product = each ? operation_of<ExpertProduct>(*each) : nullptr;
  if (!product || !numbers || numbers->dtype() != mx::float32 || !serves(s, rows)) return std::nullopt;
  auto chosen = each->inputs()[1].shape(), shape = chosen, ones = chosen;
  shape.push_back(each->shape(-1)), ones.push_back(1);
  if (numbers->shape() != chosen || weights.shape() != ones || rows.shape() != shape) return std::nullopt;
  ExpertProduct fused = *product;
  fused.form = ExpertProduct::WEIGHTED;
  return make(s, std::move(fused), mx::float32, joined(each->inputs(), {*numbers}));
}

/* The chosen numbers with another form; nothing for anything but plain ones. */
Maybe chosen_numbers(const array &a, decltype(ChosenNumbers::form) form, mx::StreamOrDevice s) {
  auto *numbers = operation_of<ChosenNumbers>(a);
  if (!numbers || numbers->form != ChosenNumbers::PLAIN || !serves(s, a)) return std::nullopt;
  return make(s, ChosenNumbers{numbers->before, form}, mx::float32, a.inputs());
}

/* Chosen numbers divided by a function of their sum, or those times a factor; nothing for anything else. */
Maybe chosen_shares(const array &a, const array &b, mx::StreamOrDevice s) {
  auto *numbers = operation_of<ChosenNumbers>(a);
  const Function f = Function::of(b);
  auto *sum = numbers ? operation_of<ChosenNumbers>(f.x) : nullptr;
  if (!sum || numbers->form != ChosenNumbers::PLAIN || !(*sum == ChosenNumbers{numbers->before, ChosenNumbers::SUM}) || a.inputs()[0].id() != f.x.inputs()[0].id() || a.inputs()[1].id() != f.x.inputs()[1].id() || !serves(s, a))
    return std::nullopt;
  return make(s, ChosenNumbers{numbers->before, ChosenNumbers::SHARES, f.formula}, mx::float32, a.inputs());
}
Maybe scaled_shares(const array &number, const array &a, mx::StreamOrDevice s) {
  auto *shares = operation_of<ChosenNumbers>(a);
  const auto factor = constant_of(number, a);
  if (!factor || !shares || shares->form != ChosenNumbers::SHARES || shares->factor != 1 || !serves(s, a)) return std::nullopt;
  return make(s, ChosenNumbers{shares->before, shares->form, shares->of_sum, *factor}, mx::float32, a.inputs());
}

/* Norms, and what is added to them; nothing for anything else. */
Maybe norms_and(const array &normed, const array &other, mx::StreamOrDevice s) {
  auto *norm = operation_of<NormedRows>(normed);
  if (!norm || !norm->plain() || !alike(normed, other) || !serves(s, normed)) return std::nullopt;
  NormedRows sum = *norm;
  sum.added = true;
  return make(s, std::move(sum), mx::float32, joined(normed.inputs(), {other}));
}

/* The sum of a product and a bias or a residual, of norms and a residual, or of a convolution and its bias, as one operation. */
Maybe fused_sum(const array &a, const array &b, mx::StreamOrDevice s) {
  if (!kernels) return std::nullopt;
  auto *convolved = operation_of<Convolved>(a);
  if (convolved && !convolved->biased && !convolved->silu && b.dtype() == mx::float32 && b.ndim() == 1 && b.shape(0) == a.shape(-1) && serves(s, a)) {
    Arrays inputs = a.inputs();
    inputs.push_back(b);
    return make(s, Convolved{convolved->dilation, convolved->parts, true}, mx::float32, std::move(inputs));
  }
  if (auto experts = biased_experts(a, b, s)) return experts;
  for (auto fuse : {scaled_rows_and, experts_and, all_experts_and, norms_and})
    for (auto [sum, other] : {std::pair(&a, &b), std::pair(&b, &a)})
      if (auto fused = fuse(*sum, *other, s)) return fused;
  const array &product = product_of(b) ? b : a, &other = &product == &a ? b : a;
  if (!product_of(product) || other.dtype() != mx::float32 || !serves(s, a)) return std::nullopt;
  PackedProduct fused = *product_of(product);
  if (alike(a, b)) fused.form = PackedProduct::ADDED;
  else if (!fused.biased && product.dtype() == mx::float32 && other.ndim() == 1 && other.shape(0) == product.shape(-1)) fused.biased = true;
  else return std::nullopt;
  Arrays inputs = product.inputs();
  inputs.push_back(other);
  return make(s, std::move(fused), mx::float32, std::move(inputs));
}

}  // namespace

/* --- What stands in front of libmlx */

namespace mlx::core {

namespace {

template <typename F> array either(const Maybe &ours, const F &own) { return ours ? *ours : own(); }

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
  auto batch = x.shape(), of_rows = batch;
  batch.resize(batch.size() - 2);
  batch = broadcast_shapes(batch, rhs_indices->shape());
  const array *rows = input_of(x, "ExpandDims");
  if (rows) of_rows = rows->shape(), of_rows.insert(of_rows.end() - 1, 2, 1);
  if (of_rows != x.shape()) rows = nullptr;
  Arrays inputs = {rows ? *rows : x, batch == rhs_indices->shape() ? *rhs_indices : broadcast_to(*rhs_indices, batch, s), w, scales};
  if (biases) inputs.push_back(*biases);
  return make(s, ExpertProduct{*packing, rows != nullptr}, packing->mode == AFFINE ? promote_types(x.dtype(), scales.dtype()) : x.dtype(), std::move(inputs));
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

EXPORT array sigmoid(const array &x, StreamOrDevice s) { return either(function(SIGMOID, x, s), [&] { return own_sigmoid(x, s); }); }
EXPORT array tanh(const array &x, StreamOrDevice s) { return either(function(TANH, x, s), [&] { return own_tanh(x, s); }); }
EXPORT array exp(const array &x, StreamOrDevice s) { return either(function(EXP, x, s), [&] { return own_exp(x, s); }); }
EXPORT array expm1(const array &x, StreamOrDevice s) { return either(function(EXPM1, x, s), [&] { return own_expm1(x, s); }); }
EXPORT array erf(const array &x, StreamOrDevice s) { return either(function(ERF, x, s), [&] { return own_erf(x, s); }); }
EXPORT array square(const array &x, StreamOrDevice s) { return either(function(MULTIPLY, x, x, s), [&] { return own_square(x, s); }); }
EXPORT array negative(const array &x, StreamOrDevice s) { return either(kernels ? with_constant(MULTIPLY, x, -1, false, s) : std::nullopt, [&] { return own_negative(x, s); }); }
EXPORT array operator-(const array &x) { return negative(x, {}); }
EXPORT array power(const array &x, const array &y, StreamOrDevice s) {
  const auto exponent = kernels ? constant_of(y, x) : std::nullopt;
  auto power = exponent == 2 || exponent == 3 ? function(MULTIPLY, x, x, s) : std::nullopt;
  if (power && exponent == 3) power = function(MULTIPLY, x, *power, s);
  return either(power, [&] { return own_power(x, y, s); });
}
EXPORT array logaddexp(const array &a, const array &b, StreamOrDevice s) {
  return either(kernels && constant_of(b, a) == 0 ? function(SOFTPLUS, a, s) : std::nullopt, [&] { return own_logaddexp(a, b, s); });
}
EXPORT array multiply(const array &a, const array &b, StreamOrDevice s) {
  if (!kernels) return own_multiply(a, b, s);
  if (auto scaled = a.ndim() < b.ndim() ? scaled_norm(a, b, s) : scaled_norm(b, a, s)) return *scaled;
  if (auto scaled = a.ndim() < b.ndim() ? scaled_shares(a, b, s) : scaled_shares(b, a, s)) return *scaled;
  for (auto [rows, weights] : {std::pair(&a, &b), std::pair(&b, &a)})
    if (auto weighted = weighted_experts(*rows, *weights, s)) return *weighted;
  auto fused = function(MULTIPLY, a, b, s);
  if (auto convolved = activated(fused, s)) return *convolved;
  if (!fused) fused = gated(a, b, s);
  if (!fused) fused = scaled_rows(a, b, s);
  return either(fused ? fused : scaled_rows(b, a, s), [&] { return own_multiply(a, b, s); });
}
EXPORT array add(const array &a, const array &b, StreamOrDevice s) {
  auto fused = function(ADD, a, b, s); /* first: a product plus a function of it is no product plus a residual */
  return either(fused ? fused : fused_sum(a, b, s), [&] { return own_add(a, b, s); });
}
EXPORT array subtract(const array &a, const array &b, StreamOrDevice s) { return either(function(SUBTRACT, a, b, s), [&] { return own_subtract(a, b, s); }); }
EXPORT array divide(const array &a, const array &b, StreamOrDevice s) {
  auto shares = chosen_shares(a, b, s);
  return either(shares ? shares : function(DIVIDE, a, b, s), [&] { return own_divide(a, b, s); });
}
EXPORT array maximum(const array &a, const array &b, StreamOrDevice s) { return either(function(LARGER, a, b, s), [&] { return own_maximum(a, b, s); }); }
EXPORT array minimum(const array &a, const array &b, StreamOrDevice s) { return either(function(SMALLER, a, b, s), [&] { return own_minimum(a, b, s); }); }
EXPORT array clip(const array &x, const Maybe &least, const Maybe &most, StreamOrDevice s) {
  const bool fits = kernels && (least || most) && (!least || constant_of(*least, x)) && (!most || constant_of(*most, x)) && x.dtype() == float32 && serves(s, x);
  if (!fits) return own_clip(x, least, most, s);
  array y = least ? maximum(x, *least, s) : x;
  return most ? minimum(y, *most, s) : y;
}
EXPORT array concatenate(std::vector<array> arrays, int axis, StreamOrDevice s) {
  const int ndim = arrays.empty() ? 0 : (int)arrays[0].ndim(), along = axis < 0 ? axis + ndim : axis;
  bool fits = kernels && ndim >= 1 && ndim <= MOST_AXES && along >= 0 && along < ndim;
  for (size_t i = 0; fits && i < arrays.size(); i++) {
    auto shape = arrays[i].shape();
    if ((int)shape.size() == ndim) shape[along] = arrays[0].shape(along);
    fits = shape == arrays[0].shape() && arrays[i].dtype() == arrays[0].dtype() && serves(s, arrays[i]);
  }
  if (!fits || arrays.size() < 2) return own_concatenate(std::move(arrays), axis, s);
  const Dtype type = arrays[0].dtype();
  return make(s, Joined{along}, type, std::move(arrays));
}
EXPORT array conv1d(const array &x, const array &weight, int stride, int padding, int dilation, int groups, StreamOrDevice s) {
  const bool fits = kernels && stride == 1 && padding == 0 && Convolved::fits(x, weight, dilation, groups) && serves(s, x);
  if (!fits) return own_conv1d(x, weight, stride, padding, dilation, groups, s);
  auto *joined = operation_of<Joined>(x);
  Arrays inputs = joined && *joined == Joined{1} ? x.inputs() : Arrays{x};
  const size_t parts = inputs.size();
  inputs.push_back(weight);
  return make(s, Convolved{dilation, parts}, float32, std::move(inputs));
}
EXPORT array conv_general(array x, array weight, Ints stride, Ints before, Ints after, Ints dilation, Ints spread, int groups, bool flip, StreamOrDevice s) {
  auto all = [](const Ints &numbers, int number) { return std::ranges::all_of(numbers, [&](int each) { return each == number; }); };
  const bool fits = x.ndim() == 3 && all(stride, 1) && all(before, 0) && all(after, 0) && all(dilation, 1) && all(spread, 1) && !flip;
  return fits ? conv1d(x, weight, 1, 0, 1, groups, s) : own_conv_general(std::move(x), std::move(weight), stride, before, after, dilation, spread, groups, flip, s);
}
/* A part of each row of a choice; nothing for anything else. */
static Maybe fewer_chosen(const array &a, const Shape &start, const Shape &stop, const Shape &strides, StreamOrDevice s) {
  auto *choice = operation_of<Choice>(a);
  if (!choice || start.size() != a.ndim() || stop.size() != a.ndim() || strides != Shape(a.ndim(), 1) || !serves(s, a)) return std::nullopt;
  int from = 0, to = 0;
  for (int i = 0; i < (int)a.ndim(); i++) {
    const int length = a.shape(i);
    auto place = [&](int at) { return std::clamp(at < 0 ? at + length : at, 0, length); };
    from = place(start[i]), to = place(stop[i]);
    if (i + 1 < (int)a.ndim() && (from || to < length)) return std::nullopt;
  }
  if (from >= to) return std::nullopt;
  return make(s, Choice{choice->kth, choice->first + from, to - from, choice->before, choice->after, choice->biased}, uint32, a.inputs());
}
/* Few rows of joined ones, the state of a convolution, are joined by themselves: then nothing may ask for all of them. */
EXPORT array slice(const array &a, Shape start, Shape stop, Shape strides, StreamOrDevice s) {
  if (auto chosen = fewer_chosen(a, start, stop, strides, s)) return *chosen;
  auto *joined = operation_of<Joined>(a);
  if (!joined || a.ndim() != 3 || joined->axis != 1 || strides != Shape{1, 1, 1} || start.size() != 3 || stop.size() != 3 || !serves(s, a))
    return own_slice(a, std::move(start), std::move(stop), std::move(strides), s);
  Shape from = start, to = stop;
  for (int i = 0; i < 3; i++)
    for (auto *place : {&from[i], &to[i]}) *place = std::clamp(*place < 0 ? *place + a.shape(i) : *place, 0, a.shape(i));
  const int rows = to[1] - from[1];
  if (from[0] || from[2] || to[0] < a.shape(0) || to[2] < a.shape(2) || rows < 1 || rows > (int)STATE_ROWS) return own_slice(a, std::move(start), std::move(stop), std::move(strides), s);
  return make(s, Joined{1, joined->first + from[1], joined->last + a.shape(1) - to[1]}, a.dtype(), a.inputs());
}
EXPORT array contiguous(const array &a, bool columns, StreamOrDevice s) { return operation_of<Joined>(a) && serves(s, a) ? a : own_contiguous(a, columns, s); }
EXPORT array argpartition(const array &a, int kth, int axis, StreamOrDevice s) {
  const int n = a.ndim() ? a.shape(-1) : 0, place = kth < 0 ? kth + n : kth;
  const bool fits = kernels && a.dtype() == float32 && a.ndim() >= 1 && a.ndim() <= MOST_AXES && (axis == -1 || axis + 1 == (int)a.ndim()) && place >= 0 && place < n && serves(s, a);
  if (!fits) return own_argpartition(a, kth, axis, s);
  const Function f = Function::of(a);
  const array *sum = &f.x, *keys = input_of(*sum, "Add"), *bias = keys ? input_of(sum->inputs()[1], "Broadcast") : nullptr;
  if (!bias || bias->ndim() != 1 || bias->shape(0) != n || bias->dtype() != float32 || !alike(*keys, *sum)) return make(s, Choice{place, 0, n, f.formula}, uint32, {f.x});
  const Function before = Function::of(*keys);
  return make(s, Choice{place, 0, n, before.formula, f.formula, true}, uint32, {before.x, *bias});
}
EXPORT array stop_gradient(const array &a, StreamOrDevice s) { return operation_of<Choice>(a) && !a.is_tracer() ? a : own_stop_gradient(a, s); }
EXPORT array take_along_axis(const array &a, const array &indices, int axis, StreamOrDevice s) {
  bool fits = operation_of<Choice>(indices) && a.dtype() == float32 && a.ndim() == indices.ndim() && (axis == -1 || axis + 1 == (int)a.ndim()) && serves(s, a);
  for (int i = 0; fits && i + 1 < (int)a.ndim(); i++) fits = a.shape(i) == indices.shape(i);
  if (!fits) return own_take_along_axis(a, indices, axis, s);
  const Function f = Function::of(a);
  return make(s, ChosenNumbers{f.formula}, float32, {f.x, indices});
}
EXPORT array sum(const array &a, const std::vector<int> &axes, bool keepdims, StreamOrDevice s) {
  const int axis = axes.size() == 1 ? axes[0] < 0 ? axes[0] : axes[0] - (int)a.ndim() : 0;
  if (auto total = axis == -1 && keepdims ? chosen_numbers(a, ChosenNumbers::SUM, s) : std::nullopt) return *total;
  auto *experts = axis == -2 && a.ndim() > 1 && !keepdims ? operation_of<ExpertProduct>(a) : nullptr;
  if (!experts || experts->form != ExpertProduct::WEIGHTED || !serves(s, a)) return own_sum(a, axes, keepdims, s);
  ExpertProduct fused = *experts;
  fused.form = ExpertProduct::SUMMED;
  return make(s, std::move(fused), float32, a.inputs());
}
namespace {

/* The product with weights that are stored transposed, in one piece; nothing for anything else. */
Maybe plain_product(const array &x, const array &w, const Maybe &bias, StreamOrDevice s) {
  const array *stored = kernels ? input_of(w, "Transpose") : nullptr;
  if (!stored || static_cast<const Transpose &>(w.primitive()).state() != std::vector<int>{1, 0} || x.ndim() < 2 || x.dtype() != float32 || stored->dtype() != float32 || stored->shape(0) != w.shape(1) || x.shape(-1) != w.shape(0) || stored->has_primitive() ||
      !stored->is_available() || !stored->flags().row_contiguous || (bias && (bias->dtype() != float32 || bias->ndim() != 1 || bias->shape(0) != w.shape(1))) || !PlainProduct::sgemm() || w.size() == 0 || !serves(s, x))
    return std::nullopt;
  return make(s, PlainProduct{}, float32, bias ? Arrays{x, *stored, *bias} : Arrays{x, *stored});
}

}  // namespace
EXPORT array matmul(const array &a, const array &b, StreamOrDevice s) { return either(plain_product(a, b, std::nullopt, s), [&] { return own_matmul(a, b, s); }); }
EXPORT array addmm(array c, array a, array b, const float &alpha, const float &beta, StreamOrDevice s) {
  return either(alpha == 1 && beta == 1 ? plain_product(a, b, c, s) : std::nullopt, [&] { return own_addmm(c, a, b, alpha, beta, s); });
}
EXPORT array softmax(const array &x, const std::vector<int> &axes, bool precise, StreamOrDevice s) {
  if (auto chosen = axes == std::vector<int>{-1} || axes == std::vector<int>{(int)x.ndim() - 1} ? chosen_numbers(x, ChosenNumbers::SOFTMAX, s) : std::nullopt) return *chosen;
  bool fits = kernels && x.dtype() == float32 && x.ndim() >= 1 && x.ndim() <= MOST_AXES && axes.size() == 1 && (axes[0] == -1 || axes[0] + 1 == (int)x.ndim()) && serves(s, x);
  return fits ? make(s, RowSoftmax{}, float32, {x}) : own_softmax(x, axes, precise, s);
}

namespace fast {

EXPORT array rms_norm(const array &x, const Maybe &weight, float eps, StreamOrDevice s) {
  if (!kernels || x.ndim() < 1 || x.ndim() > MOST_AXES || !is_float(x) || (weight && (weight->ndim() != 1 || !is_float(*weight) || weight->shape(0) != x.shape(-1))) || !serves(s, x))
    return own_rms_norm(x, weight, eps, s);
  const Function of_weight = Function::of(weight.value_or(x));
  Arrays inputs = {x};
  if (weight) inputs.push_back(of_weight.x);
  return make(s, NormedRows{eps, weight.has_value(), 1, {}, weight ? of_weight.formula : Formula{}}, weight ? result_type(x, *weight) : x.dtype(), std::move(inputs));
}

EXPORT array layer_norm(const array &x, const Maybe &weight, const Maybe &bias, float eps, StreamOrDevice s) {
  auto fits = [&](const Maybe &each) { return !each || (each->dtype() == float32 && each->ndim() == 1 && each->shape(0) == x.shape(-1)); };
  if (!kernels || x.ndim() < 1 || x.ndim() > MOST_AXES || x.dtype() != float32 || !fits(weight) || !fits(bias) || !serves(s, x)) return own_layer_norm(x, weight, bias, eps, s);
  Arrays inputs = {x};
  if (weight) inputs.push_back(*weight);
  if (bias) inputs.push_back(*bias);
  return make(s, CentredRows{eps, weight.has_value(), bias.has_value()}, float32, std::move(inputs));
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
  const bool in_order = mode == "" && !mask;
  const Maybe newest = in_order ? newest_of(k) : std::nullopt;
  if (newest) inputs.push_back(*newest);
  const bool rounds = asked && q.shape(0) == asked->batch && q.shape(2) == asked->length;
  return make(s, FusedAttention{scale, mode == "causal" && q.shape(2) > 1, mask.has_value(), sinks.has_value(), newest.has_value(), in_order ? oldest_of(k) : 0, rounds ? asked : nullptr}, q.dtype(), std::move(inputs));
}

/* A kernel of ours by its name: the scans have one call on all devices. */
EXPORT CustomKernelFunction cuda_kernel(const std::string &name, const std::vector<std::string> &input_names, const std::vector<std::string> &output_names,
                                        const std::string &source, const std::string &header, bool ensure_row_contiguous, int shared_memory) {
  const int rule = kernels ? rule_of(name) : -1;
  const bool gates = kernels && name == "runner_gates", mixes = kernels && name == "runner_sparsemixer";
  if (rule < 0 && !gates && !mixes) return own_cuda_kernel(name, input_names, output_names, source, header, ensure_row_contiguous, shared_memory);
  return [rule, gates, mixes, table = kernels](const Arrays &in, const std::vector<Shape> &shapes, const std::vector<Dtype> &types, std::tuple<int, int, int>, std::tuple<int, int, int>,
                                        std::vector<std::pair<std::string, TemplateArg>>, std::optional<float>, bool, StreamOrDevice s) {
    auto checked = [&](auto operation) {
      operation.check(in);
      return make(s, std::move(operation), in);
    };
    if (gates) return checked(Gating{table});
    if (mixes) return checked(Sparsemixer{table, shapes.at(0).back()});
    Recurrence scan{rule, false, types.at(0), table};
    scan.masked = in.size() > scan.inputs() + 1;
    return checked(std::move(scan));
  };
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

/* Lets mx.compile keep graphs as they are, since fused operations would not be ours; or lets it do nothing. */
extern "C" EXPORT void kernels_compile(int on) { mx::set_compile_mode(on ? mx::CompileMode::no_fuse : mx::CompileMode::disabled); }

/* The number of operations that kernels computed so far. */
extern "C" EXPORT int64_t kernels_calls() { return calls; }
