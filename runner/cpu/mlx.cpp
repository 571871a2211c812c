/* Puts the kernels in front of MLX, on CPU streams.
 *
 * Loaded after libmlx.so with RTLD_GLOBAL, this library stands before it in the global scope, so mlx's Python module binds
 * to the functions exported here. Each looks whether the kernels can do the case. If so it returns an array with a
 * primitive of its own, else it calls libmlx's function. libmlx's own primitives cannot be used as bases: their vtables
 * are not exported. The layout of arrays and primitives is that of one exact version, so `kernels_use` compares
 * versions before anything else; until it succeeds, every function calls libmlx's.
 *
 * Primitives allocate their output and put a task on the stream's queue; MLX keeps inputs and output until it has run. */
#include <dlfcn.h>

#include <algorithm>
#include <array>
#include <cmath>
#include <cstring>
#include <numeric>

#include "mlx/allocator.h"
#include "mlx/array.h"
#include "mlx/backend/cpu/encoder.h"
#include "mlx/fast.h"
#include "mlx/ops.h"
#include "mlx/primitives.h"
#include "mlx/transforms.h"
#include "mlx/version.h"

#include "kernels.h"

#define EXPORT __attribute__((visibility("default")))
#define TEXT_OF(NUMBER) #NUMBER
#define VERSION_TEXT(A, B, C) TEXT_OF(A) "." TEXT_OF(B) "." TEXT_OF(C)
#define MLX_WANTED VERSION_TEXT(MLX_VERSION_MAJOR, MLX_VERSION_MINOR, MLX_VERSION_PATCH)

namespace mx = mlx::core;
using mx::array;
using Arrays = std::vector<array>;
using Maybe = std::optional<array>;

namespace {

typedef void (*share_fn)(void (*)(const void *, int), const void *, int, int);

const Kernels *kernels = nullptr; /* nullptr: everything goes to libmlx */
share_fn share = nullptr;   /* of the threads in pool.h */
int many = 1, few = 1;       /* threads, for products of many and of few rows */
int64_t calls = 0;

enum : size_t {
  UNPACKED = 96 * 1024,   /* weights unpacked at a time: with a thread's rows of x, they fit into a second-level cache */
  WORTH_SHARING = 150000, /* multiplications */
  WORTH_JOINING = 1 << 14, /* bytes of a result */
  BRIEF_ROWS = 8,         /* those of answers */
  ROWS_AT_ONCE = 96,      /* for which packed values are unpacked once */
  LINE = 64,              /* bytes, of the cache */
};

int type_of(mx::Dtype type) {
  return type == mx::float32 ? F32 : type == mx::float16 ? F16 : type == mx::bfloat16 ? BF16 : type == mx::bool_ ? BOOL : -1;
}
bool is_float(const array &a) { return type_of(a.dtype()) >= F32 && type_of(a.dtype()) <= BF16; }
bool serves(mx::StreamOrDevice s, const array &x) { return kernels && x.size() > 0 && mx::to_stream(s).device == mx::Device::cpu; }

/* Memory for the kernels begins with a line of the cache: otherwise every load of a whole vector may cross two of them. */
float *aligned(float *p) { return (float *)(((uintptr_t)p + LINE - 1) / LINE * LINE); }

/* Memory of one thread for the kernels, which grows with what they ask for. */
float *scratch(size_t floats) {
  static thread_local std::vector<float> room;
  if (room.size() < floats + LINE) room.resize(floats + LINE);
  return aligned(room.data());
}

enum Sharing { ALONE, BRIEFLY, WHOLLY };

/* How work on rows, of so many multiplications, is shared among threads. */
Sharing shares(size_t rows, size_t work) {
  if (work <= WORTH_SHARING) return ALONE;
  return rows <= BRIEF_ROWS ? (few > 1 ? BRIEFLY : ALONE) : many > 1 ? WHOLLY : ALONE;
}

/* Calls f(0) to f(count - 1), on the threads that `sharing` says. */
template <typename F> void each(int count, Sharing sharing, const F &f) {
  if (sharing != ALONE && count > 1)
    share([](const void *f, int i) { (*(const F *)f)(i); }, &f, count, sharing == BRIEFLY);
  else
    for (int i = 0; i < count; i++) f(i);
}

void allocate(array &a) { a.set_data(mx::allocator::malloc(a.nbytes())); }

array temporary(mx::Shape shape, mx::Dtype type, mx::cpu::CommandEncoder &encoder) {
  array a(std::move(shape), type, nullptr, {});
  allocate(a);
  encoder.add_temporary(a);
  return a;
}
/* Memory for `rows` rows of k numbers, a line of the cache or more, while an operation runs. */
float *room_for(size_t rows, size_t k, mx::cpu::CommandEncoder &encoder) {
  return aligned(temporary({(int)rows + 1, (int)k}, mx::float32, encoder).data<float>());
}

enum { MOST_AXES = 8 };

/* The rows of an array whose last axis is contiguous: where each begins, counted over all other axes. */
struct Rows {
  const char *p;
  size_t count = 1, item;
  int axes = 0;
  int64_t strides[MOST_AXES];
  int shape[MOST_AXES];

  explicit Rows(const array &a) : p(a.data<char>()), item(a.itemsize()) {
    for (int i = 0; i + 1 < (int)a.ndim(); i++) add(a.shape(i), a.strides()[i]);
  }
  /* The rows of x [..., rows, k], repeated as its leading axes are broadcast to `batch`. */
  Rows(const array &x, const mx::Shape &batch) : p(x.data<char>()), item(x.itemsize()) {
    const int missing = (int)batch.size() + 2 - (int)x.ndim();
    for (int i = 0; i < (int)batch.size(); i++)
      add(batch[i], i < missing || x.shape(i - missing) == 1 ? 0 : x.strides()[i - missing]);
    add(x.shape(-2), x.strides()[x.ndim() - 2]);
  }
  void add(int length, int64_t stride) {
    count *= length;
    if (length == 1) return;
    if (axes && strides[axes - 1] == stride * length) {
      strides[axes - 1] = stride;
      shape[axes - 1] *= length;
    } else {
      strides[axes] = stride;
      shape[axes++] = length;
    }
  }
  const void *operator[](size_t row) const {
    int64_t at = 0;
    for (int i = axes - 1; i >= 0; i--) {
      at += (int64_t)(row % shape[i]) * strides[i];
      row /= shape[i];
    }
    return p + at * (int64_t)item;
  }
};

bool has_rows(const array &a) { return a.strides().back() == 1 || a.shape(-1) == 1; }

/* The array, or a copy in one piece if `fits` says no: made on the stream, before the task that needs it. */
array fitting(const array &a, bool fits, mx::cpu::CommandEncoder &encoder) {
  if (fits) return a;
  array copy = temporary(a.shape(), a.dtype(), encoder);
  encoder.dispatch([from = a.data<char>(), to = copy.data<char>(), shape = a.shape(), strides = a.strides(), item = a.itemsize(), n = a.size()] {
    const size_t row = shape.size() && strides.back() == 1 ? shape.back() : 1; /* copied at once */
    std::vector<int> place(shape.size(), 0);
    for (size_t i = 0; i < n; i += row) {
      int64_t at = 0;
      for (size_t d = 0; d < shape.size(); d++) at += place[d] * strides[d];
      memcpy(to + i * item, from + at * (int64_t)item, item * row);
      if (row > 1) place.back() = shape.back() - 1;
      for (int d = (int)shape.size() - 1; d >= 0 && ++place[d] == shape[d]; d--) place[d] = 0;
    }
  });
  return copy;
}
array whole(const array &a, mx::cpu::CommandEncoder &encoder) { return fitting(a, a.flags().row_contiguous, encoder); }

/* The distance between the matrices of an array [..., rows, columns], in elements; nothing if they are not each in one
 * piece and equally far from one another. */
std::optional<int64_t> matrix_stride(const array &a) {
  const int last = (int)a.ndim() - 1;
  if (a.strides()[last] != 1 || (a.shape(last - 1) > 1 && a.strides()[last - 1] != a.shape(last))) return std::nullopt;
  int64_t stride = 0, count = 1;
  for (int i = last - 2; i >= 0; i--) {
    if (a.shape(i) == 1) continue;
    if (!stride) stride = a.strides()[i];
    if (a.strides()[i] != stride * count) return std::nullopt;
    count *= a.shape(i);
  }
  return stride;
}
uint32_t matrices_of(const array &a) { return a.size() / ((size_t)a.shape(-1) * a.shape(-2)); }
array with_matrices(const array &a, mx::cpu::CommandEncoder &encoder) { return fitting(a, matrix_stride(a).has_value(), encoder); }
array with_rows(const array &a, mx::cpu::CommandEncoder &encoder) { return fitting(a, has_rows(a), encoder); }

/* A primitive for one operation: a value with `name`, `run`, `shape`, equality, and libmlx's `original` for gradients. */
template <typename Operation> class Fast : public mx::Primitive {
 public:
  const Operation operation;

  Fast(mx::Stream stream, Operation operation) : Primitive(stream), operation(std::move(operation)) {}
  const char *name() const override { return Operation::name; }
  void eval_cpu(const Arrays &in, Arrays &out) override {
    calls++;
    allocate(out[0]);
    operation.run(in, out[0], mx::cpu::get_command_encoder(stream()));
  }
  void eval_gpu(const Arrays &, Arrays &) override { throw std::runtime_error("This operation was made for a CPU stream."); }
  bool is_equivalent(const mx::Primitive &other) const override {
    auto *same = dynamic_cast<const Fast *>(&other);
    return same && same->operation == operation;
  }
  std::vector<mx::Shape> output_shapes(const Arrays &in) override { return {operation.shape(in)}; }
  Arrays vjp(const Arrays &primals, const Arrays &cotangents, const std::vector<int> &argnums, const Arrays &) override {
    Arrays chosen;
    for (int i : argnums) chosen.push_back(primals[i]);
    auto f = [&](const Arrays &x) {
      Arrays in = primals;
      for (size_t i = 0; i < argnums.size(); i++) in[argnums[i]] = x[i];
      return Arrays{operation.original(in, stream())};
    };
    return mx::vjp(f, chosen, cotangents).second;
  }
  std::pair<Arrays, std::vector<int>> vmap(const Arrays &in, const std::vector<int> &axes) override {
    auto out = mx::vmap([&](const Arrays &x) { return Arrays{operation.original(x, stream())}; }, axes)(in);
    return {out, {0}};
  }
};

template <typename Operation> array make(mx::StreamOrDevice s, Operation operation, mx::Dtype type, Arrays inputs) {
  auto shape = operation.shape(inputs);
  auto primitive = std::make_shared<Fast<Operation>>(mx::to_stream(s), std::move(operation));
  return array(std::move(shape), type, std::move(primitive), std::move(inputs));
}

Maybe maybe(const Arrays &in, size_t i, bool there = true) { return there && i < in.size() ? Maybe(in[i]) : std::nullopt; }

bool all_found = true;

/* libmlx's function of the same name as one that is exported here. */
template <typename F> F *libmlx(F *exported) {
  static void *library = dlopen("libmlx.so", RTLD_NOLOAD | RTLD_NOW);
  Dl_info info;
  void *found = library && dladdr((void *)exported, &info) ? dlsym(library, info.dli_sname) : nullptr;
  all_found = all_found && found;
  return (F *)found;
}

using RopeFromArray = array(const array &, int, bool, std::optional<float>, float, const array &, const Maybe &, mx::StreamOrDevice);
using JoinedAlong = array(std::vector<array>, int, mx::StreamOrDevice);
using SoftmaxOfAxes = array(const array &, const std::vector<int> &, bool, mx::StreamOrDevice);

const auto own_quantized_matmul = libmlx(&mx::quantized_matmul);
const auto own_gather_qmm = libmlx(&mx::gather_qmm);
const auto own_dequantize = libmlx(&mx::dequantize);
const auto own_sigmoid = libmlx(&mx::sigmoid);
const auto own_tanh = libmlx(&mx::tanh);
const auto own_exp = libmlx(&mx::exp);
const auto own_multiply = libmlx(&mx::multiply);
const auto own_add = libmlx(&mx::add);
const auto own_concatenate = libmlx((JoinedAlong *)&mx::concatenate);
const auto own_softmax = libmlx((SoftmaxOfAxes *)&mx::softmax);
const auto own_rms_norm = libmlx(&mx::fast::rms_norm);
const auto own_rope = libmlx((RopeFromArray *)&mx::fast::rope);
const auto own_attention = libmlx(&mx::fast::scaled_dot_product_attention);

/* --- Padding */

/* Which tokens of a forward [batch, length] are asked for: the first ones of each row. The others are padding: what they
 * compute is never used, so that products and attention may leave it out, and return zeros. */
struct Asked {
  int batch, length;
  std::vector<int> counts;    /* of each row of the batch */
  std::vector<uint32_t> rows; /* of [batch * length] */
};
using MaybeAsked = std::shared_ptr<const Asked>;
thread_local MaybeAsked asked; /* in the graph that this thread builds; nullptr: all */

MaybeAsked asked_of(const array &x) {
  return asked && x.ndim() == 3 && x.shape(0) == asked->batch && x.shape(1) == asked->length ? asked : nullptr;
}

/* --- Products with packed weights */

struct Packing {
  int bits, group, mode;
  bool operator==(const Packing &) const = default;

  static std::optional<Packing> of(std::optional<int> group, std::optional<int> bits, const std::string &mode) {
    if (mode == "affine") {
      Packing p{bits.value_or(4), group.value_or(64), AFFINE};
      bool known = p.bits >= 2 && p.bits <= 8 && p.bits != 7 && (p.group == 32 || p.group == 64 || p.group == 128);
      return known ? std::optional(p) : std::nullopt;
    }
    Packing p = mode == "mxfp4" ? Packing{4, 32, MXFP4} : mode == "mxfp8" ? Packing{8, 32, MXFP8} : Packing{4, 16, NVFP4};
    bool known = (p.mode != NVFP4 || mode == "nvfp4") && group.value_or(p.group) == p.group && bits.value_or(p.bits) == p.bits;
    return known ? std::optional(p) : std::nullopt;
  }
  const char *mode_name() const { return mode == AFFINE ? "affine" : mode == MXFP4 ? "mxfp4" : mode == MXFP8 ? "mxfp8" : "nvfp4"; }

  bool fits(const array &w, const array &scales, const Maybe &biases, size_t k) const {
    if (w.dtype() != mx::uint32 || w.ndim() != scales.ndim() || w.ndim() < 2) return false;
    for (int i = 0; i + 1 < (int)w.ndim(); i++)
      if (w.shape(i) != scales.shape(i)) return false;
    if ((size_t)w.shape(-1) * 32 != k * bits || (size_t)scales.shape(-1) * group != k) return false;
    if (mode != AFFINE) return !biases && scales.dtype() == mx::uint8;
    return biases && biases->shape() == scales.shape() && is_float(scales) && biases->dtype() == scales.dtype();
  }

  /* A product with these weights, of no rows yet. */
  Product product(const array &w, const array &scales, const void *biases, size_t k, array &out) const {
    Product p{};
    p.k = p.ldx = k;
    p.n = w.shape(-2);
    p.bits = bits, p.group = group, p.mode = mode;
    p.w = w.data<uint8_t>(), p.scales = scales.data<void>(), p.biases = biases, p.scale_type = type_of(scales.dtype());
    p.out = out.data<void>(), p.out_type = type_of(out.dtype());
    return p;
  }
};

/* The outputs that one call of a kernel computes: so many that starting it costs little, so few that threads can share,
 * the fewer the shorter a product is, as the last call leaves the other threads idle. */
size_t outputs_at_once(const Product &p) {
  size_t fitting = p.m <= FEW ? ((size_t)1 << 16) / p.k : std::min<size_t>(UNPACKED / p.k, p.m < 48 ? 64 : 96);
  return std::max<size_t>(1, fitting / kernels->width) * kernels->width;
}
int parts_of(const Product &p) { return (int)((p.n + outputs_at_once(p) - 1) / outputs_at_once(p)); }
void compute_part(const Product &p, int part) {
  size_t from = part * outputs_at_once(p), to = std::min(from + outputs_at_once(p), p.n);
  Product mine = p;
  mine.ahead = many * outputs_at_once(p); /* the part that this thread is likely to take next */
  kernels->product(mine, from, to, scratch(outputs_at_once(p) * p.k));
}

/* A product with packed weights, and what follows it in a forward: a residual that is added, or a gate.
 *
 * Inputs: x; then the weights, scales and biases of one product, or of two that are gated; then the residual. */
struct PackedProduct {
  static constexpr const char *name = "FastQuantizedMatmul";
  Packing packing;
  MaybeAsked asked;
  enum { PLAIN, ADDED, GATED } form = PLAIN;
  bool operator==(const PackedProduct &) const = default;

  int parts() const { return packing.mode == AFFINE ? 3 : 2; }
  array original(const Arrays &in, mx::StreamOrDevice s) const {
    auto multiply = [&](int at) {
      return own_quantized_matmul(in[0], in[at], in[at + 1], maybe(in, at + 2, parts() == 3), true, packing.group, packing.bits, packing.mode_name(), s);
    };
    array y = multiply(1);
    if (form == ADDED) return own_add(y, in.back(), s);
    return form == GATED ? own_multiply(own_multiply(y, own_sigmoid(y, s), s), multiply(1 + parts()), s) : y;
  }
  mx::Shape shape(const Arrays &in) const {
    auto shape = in[0].shape();
    shape.back() = in[1].shape(0);
    return shape;
  }
  void run(const Arrays &in, array &out, mx::cpu::CommandEncoder &encoder) const {
    array x = with_rows(in[0], encoder);
    auto product = [&](int at, array &out) {
      array w = whole(in[at], encoder), scales = whole(in[at + 1], encoder);
      return packing.product(w, scales, parts() == 3 ? whole(in[at + 2], encoder).data<void>() : nullptr, x.shape(-1), out);
    };
    Product p = product(1, out), gated{};
    Rows rows(x);
    p.m = asked ? asked->rows.size() : rows.count;
    if (asked) p.order = asked->rows.data();
    float *floats = room_for(p.m, p.k, encoder);
    p.x = floats;
    if (form == ADDED) p.added = whole(in.back(), encoder).data<float>();
    if (form == GATED) {
      array second = temporary(out.shape(), mx::float32, encoder);
      gated = product(1 + parts(), second);
      gated.m = p.m, gated.x = p.x, gated.order = p.order;
    }
    encoder.dispatch([p, gated, rows, floats, type = type_of(x.dtype()), asked = asked, row_bytes = out.itemsize() * p.n] {
      each((int)p.m, shares(p.m, p.m * p.k), [&](int i) { kernels->take(p, rows[p.order ? p.order[i] : i], type, floats + i * p.k); });
      for (int i = 0; asked && i < asked->batch; i++)
        memset((char *)p.out + row_bytes * (i * asked->length + asked->counts[i]), 0, row_bytes * (asked->length - asked->counts[i]));
      each(parts_of(p), shares(p.m, p.m * p.n * p.k), [&](int part) {
        compute_part(p, part);
        if (!gated.m) return;
        compute_part(gated, part);
        const size_t from = part * outputs_at_once(p), count = std::min(outputs_at_once(p), p.n - from);
        for (size_t i = 0; i < p.m; i++) {
          const size_t at = (p.order ? p.order[i] : i) * p.n + from;
          kernels->unary(SILU, (float *)p.out + at, (float *)gated.out + at, (float *)p.out + at, count);
        }
      });
    });
  }
};

/* The product of each matrix of x with one of several packed matrices: with those of the experts that were chosen for
 * it, or, where keys are packed, with that of its head. Inputs: x, weights, scales, the number of the matrix, biases. */
struct ExpertProduct {
  static constexpr const char *name = "FastGatherQmm";
  Packing packing;
  bool experts;
  bool operator==(const ExpertProduct &) const = default;

  array original(const Arrays &in, mx::StreamOrDevice s) const {
    const Maybe biases = maybe(in, 4);
    if (!experts) return own_quantized_matmul(in[0], in[1], in[2], biases, true, packing.group, packing.bits, packing.mode_name(), s);
    return own_gather_qmm(in[0], in[1], in[2], biases, std::nullopt, in[3], true, packing.group, packing.bits, packing.mode_name(), std::nullopt, false, s);
  }
  mx::Shape shape(const Arrays &in) const {
    auto shape = in[3].shape();
    shape.push_back(in[0].shape(-2));
    shape.push_back(in[1].shape(-2));
    return shape;
  }
  void run(const Arrays &in, array &out, mx::cpu::CommandEncoder &encoder) const {
    array x = with_rows(in[0], encoder), w = with_matrices(in[1], encoder), scales = with_matrices(in[2], encoder), chosen = whole(in[3], encoder);
    Maybe biases = in.size() > 4 ? Maybe(with_matrices(in[4], encoder)) : std::nullopt;
    Product p = packing.product(w, scales, biases ? biases->data<void>() : nullptr, x.shape(-1), out);
    Rows rows(x, chosen.shape());
    float *floats = room_for(rows.count, p.k, encoder);
    encoder.dispatch([p, rows, floats, type = type_of(x.dtype()), experts = matrices_of(w), chosen = chosen.data<uint32_t>(), each_rows = x.shape(-2),
                      expert_bytes = *matrix_stride(w) * 4, scale_bytes = *matrix_stride(scales) * scales.itemsize(),
                      bias_bytes = biases ? *matrix_stride(*biases) * biases->itemsize() : 0] {
      std::vector<uint32_t> order(rows.count);
      auto expert = [&](uint32_t row) { return std::min(chosen[row / each_rows], experts - 1); };
      std::iota(order.begin(), order.end(), 0);
      std::stable_sort(order.begin(), order.end(), [&](uint32_t a, uint32_t b) { return expert(a) < expert(b); });
      struct Job {
        Product product;
        int part;
      };
      std::vector<Job> jobs;
      for (size_t first = 0, end; first < rows.count; first = end) {
        const uint32_t of = expert(order[first]);
        for (end = first + 1; end < rows.count && expert(order[end]) == of;) end++;
        Product mine = p;
        mine.m = end - first;
        mine.x = floats + first * p.k;
        mine.order = order.data() + first;
        mine.w += of * expert_bytes;
        mine.scales = (const char *)p.scales + of * scale_bytes;
        if (p.biases) mine.biases = (const char *)p.biases + of * bias_bytes;
        for (int part = 0; part < parts_of(mine); part++) jobs.push_back({mine, part});
      }
      each((int)rows.count, shares(rows.count, rows.count * p.k), [&](int i) { kernels->take(p, rows[order[i]], type, floats + i * p.k); });
      each((int)jobs.size(), shares(rows.count, rows.count * p.n * p.k), [&](int i) { compute_part(jobs[i].product, jobs[i].part); });
    });
  }
};

/* Sums of packed rows, each times its weight: attention over values that a cache keeps packed. */
struct PackedSum {
  static constexpr const char *name = "FastPackedSum";
  Packing packing;
  bool operator==(const PackedSum &) const = default;

  array original(const Arrays &in, mx::StreamOrDevice s) const {
    return own_quantized_matmul(in[0], in[1], in[2], maybe(in, 4), false, packing.group, packing.bits, packing.mode_name(), s);
  }
  mx::Shape shape(const Arrays &in) const {
    auto shape = in[3].shape();
    shape.push_back(in[0].shape(-2));
    shape.push_back(in[1].shape(-1) * 32 / packing.bits);
    return shape;
  }
  void run(const Arrays &in, array &out, mx::cpu::CommandEncoder &encoder) const {
    array x = whole(in[0], encoder), w = with_matrices(in[1], encoder), scales = with_matrices(in[2], encoder), chosen = whole(in[3], encoder);
    Maybe biases = in.size() > 4 ? Maybe(with_matrices(in[4], encoder)) : std::nullopt;
    Product p = packing.product(w, scales, biases ? biases->data<void>() : nullptr, out.shape(-1), out);
    p.x = x.data<float>(), p.ldx = p.n;
    encoder.dispatch([p, matrices = (int)chosen.size(), chosen = chosen.data<uint32_t>(), rows = (size_t)x.shape(-2), w_bytes = *matrix_stride(w) * 4,
                      scale_bytes = *matrix_stride(scales) * scales.itemsize(), bias_bytes = biases ? *matrix_stride(*biases) * biases->itemsize() : 0] {
      std::vector<Product> jobs;
      for (int first = 0, end; first < matrices; first = end) { /* those of x that take the same rows come together */
        for (end = first + 1; end < matrices && chosen[end] == chosen[first];) end++;
        for (size_t row = first * rows; row < end * rows; row += ROWS_AT_ONCE) {
          Product part = p;
          part.m = std::min<size_t>(ROWS_AT_ONCE, end * rows - row);
          part.x += row * p.n;
          part.out = (float *)p.out + row * p.k;
          part.w += chosen[first] * w_bytes;
          part.scales = (const char *)p.scales + chosen[first] * scale_bytes;
          if (p.biases) part.biases = (const char *)p.biases + chosen[first] * bias_bytes;
          jobs.push_back(part);
        }
      }
      each((int)jobs.size(), shares(rows, matrices * rows * p.n * p.k), [&](int i) { kernels->weigh(jobs[i], scratch(KEYS * (p.k + ROWS_AT_ONCE))); });
    });
  }
};

/* The rows of an embedding. */
struct UnpackedRows {
  static constexpr const char *name = "FastDequantize";
  Packing packing;
  mx::Dtype type;
  bool operator==(const UnpackedRows &) const = default;

  array original(const Arrays &in, mx::StreamOrDevice s) const {
    return own_dequantize(in[0], in[1], maybe(in, 2), packing.group, packing.bits, packing.mode_name(), std::nullopt, type, s);
  }
  mx::Shape shape(const Arrays &in) const {
    auto shape = in[0].shape();
    shape.back() = in[1].shape(-1) * packing.group;
    return shape;
  }
  void run(const Arrays &in, array &out, mx::cpu::CommandEncoder &encoder) const {
    array w = whole(in[0], encoder), scales = whole(in[1], encoder);
    const void *biases = in.size() > 2 ? whole(in[2], encoder).data<void>() : nullptr;
    Product p = packing.product(w, scales, biases, out.shape(-1), out);
    const size_t rows = out.size() / p.k;
    encoder.dispatch([p, rows] {
      each((int)rows, shares(rows, rows * p.k), [&](int row) {
        if (p.out_type == F32) return kernels->unpack(p, row, (float *)p.out + row * p.k);
        float *room = scratch(p.k);
        kernels->unpack(p, row, room);
        kernels->from_float(room, p.k, (char *)p.out + 2 * row * p.k, p.out_type);
      });
    });
  }
};

/* --- Attention */

/* The place of the oldest of these keys [..., keys, d]: behind those that were just written, which have taken the places of
 * older ones if a window rotates. 0 if the graph does not tell: then they are in the order of their tokens.
 *
 * Layers may share keys, whose graph is gone once the first of these layers is dispatched: what it told is remembered. */
int oldest_of(const array &k) {
  static thread_local std::array<std::pair<std::uintptr_t, int>, 128> told{}; /* of the last keys by their ids */
  static thread_local size_t next;
  const auto same = std::find_if(told.begin(), told.end(), [&](const auto &each) { return each.first == k.id(); });
  if (!k.has_primitive()) return same == told.end() ? 0 : same->second % k.shape(2);
  const bool written = !strcmp(k.primitive().name(), "SliceUpdate"); /* its type is not exported */
  const int oldest = written ? std::get<2>(static_cast<const mx::SliceUpdate &>(k.primitive()).state())[2] % k.shape(2) : 0;
  (same == told.end() ? told[next++ % told.size()] : *same) = {k.id(), oldest}; /* ids are used again: so all are noted */
  return oldest;
}

struct FusedAttention {
  static constexpr const char *name = "FastAttention";
  float scale;
  bool causal, mask, sinks;
  int oldest;
  MaybeAsked asked;
  bool operator==(const FusedAttention &) const = default;

  array original(const Arrays &in, mx::StreamOrDevice s) const {
    return own_attention(in[0], in[1], in[2], scale, causal ? "causal" : "", maybe(in, 3, mask), maybe(in, in.size() - 1, sinks), false, s);
  }
  mx::Shape shape(const Arrays &in) const {
    auto shape = in[0].shape();
    shape.back() = in[2].shape(-1);
    return shape;
  }
  void run(const Arrays &in, array &out, mx::cpu::CommandEncoder &encoder) const {
    array q = with_rows(in[0], encoder), k = with_rows(in[1], encoder), v = with_rows(in[2], encoder);
    Attention a{};
    a.q = q.data<void>(), a.k = k.data<void>(), a.v = v.data<void>(), a.out = out.data<void>();
    a.kv_heads = k.shape(1), a.heads = q.shape(1) / k.shape(1), a.queries = q.shape(2), a.keys = k.shape(2);
    a.d = q.shape(3), a.dv = v.shape(3), a.type = type_of(q.dtype()), a.causal = causal, a.oldest = oldest, a.scale = scale;
    for (int i = 0; i < 3; i++) a.qs[i] = q.strides()[i], a.ks[i] = k.strides()[i], a.vs[i] = v.strides()[i];
    if (mask) {
      a.mask = in[3].data<void>(), a.mask_type = type_of(in[3].dtype());
      for (int i = 0; i < 4; i++) a.ms[i] = in[3].strides()[i];
    }
    if (sinks) a.sinks = whole(in.back(), encoder).data<void>();
    encoder.dispatch([a, batch = q.shape(0), width = (size_t)kernels->width, asked = asked, row_bytes = out.itemsize() * a.dv] {
      const int queries = std::max(8, QUERIES / a.heads), parts = (a.queries + queries - 1) / queries;
      const size_t rows = a.heads * std::min(queries, a.queries), d = (a.d + width - 1) / width * width, dv = (a.dv + width - 1) / width * width;
      const size_t room = rows * (d + dv + TILE + 3) + TILE * (d + dv), work = (size_t)batch * a.kv_heads * a.heads * a.queries * a.keys * (a.d + a.dv);
      each(batch * a.kv_heads * parts, shares(a.queries, work), [&](int i) {
        const int part = parts - 1 - i % parts, row = i / parts / a.kv_heads, kv_head = i / parts % a.kv_heads; /* the longest first */
        const int from = part * queries, to = std::min(from + queries, a.queries), end = asked ? std::clamp(asked->counts[row], from, to) : to;
        if (end > from) kernels->attend(a, row, kv_head, from, end, scratch(room));
        for (int head = 0; end < to && head < a.heads; head++)
          memset((char *)a.out + row_bytes * (((size_t)(row * a.kv_heads + kv_head) * a.heads + head) * a.queries + end), 0, row_bytes * (to - end));
      });
    });
  }
};

/* --- Rows */

struct NormedRows {
  static constexpr const char *name = "FastRMSNorm";
  float eps;
  bool operator==(const NormedRows &) const = default;

  array original(const Arrays &in, mx::StreamOrDevice s) const { return own_rms_norm(in[0], maybe(in, 1), eps, s); }
  mx::Shape shape(const Arrays &in) const { return in[0].shape(); }
  void run(const Arrays &in, array &out, mx::cpu::CommandEncoder &encoder) const {
    array x = with_rows(in[0], encoder);
    const bool weighted = in.size() > 1;
    array weight = weighted ? whole(in[1], encoder) : x;
    encoder.dispatch([eps = eps, rows = Rows(x), n = (size_t)x.shape(-1), type = type_of(x.dtype()), weight = weighted ? weight.data<void>() : nullptr,
                      weight_type = type_of(weight.dtype()), out = out.data<char>(), out_type = type_of(out.dtype()), bytes = out.itemsize() * x.shape(-1)] {
      const int part = 32, parts = (int)((rows.count + part - 1) / part);
      each(parts, shares(rows.count, rows.count * n), [&](int i) {
        for (size_t row = i * part; row < std::min<size_t>(rows.count, (i + 1) * part); row++)
          kernels->rms_norm(rows[row], type, n, weight, weight_type, eps, out + row * bytes, out_type);
      });
    });
  }
};

/* The cosines and sines of one forward: made once for all its layers that turn alike. */
struct Angles {
  int half = 0, length = 0;
  float base = 0, scale = 0;
  std::vector<int> offsets;
  std::vector<float> periods, cosines, sines;

  static const Angles &of(int half, int length, float base, float scale, std::vector<int> offsets, std::vector<float> periods) {
    static thread_local Angles kept[2];
    static thread_local int oldest = 0;
    for (auto &a : kept)
      if (a.half == half && a.length == length && a.base == base && a.scale == scale && a.offsets == offsets && a.periods == periods) return a;
    auto &a = kept[oldest];
    oldest ^= 1;
    a = {half, length, base, scale, std::move(offsets), std::move(periods), {}, {}};
    std::vector<float> speeds(half);
    for (int i = 0; i < half; i++) speeds[i] = a.periods.empty() ? (float)std::exp((float)-i * (std::log(base) / half)) : 1.0f / a.periods[i];
    for (int offset : a.offsets)
      for (int i = 0; i < length; i++)
        for (float speed : speeds) {
          const float angle = ((float)i + (float)offset) * scale * speed;
          a.cosines.push_back(std::cos(angle));
          a.sines.push_back(std::sin(angle));
        }
    return a;
  }
};

struct TurnedRows {
  static constexpr const char *name = "FastRoPE";
  int dims;
  bool traditional, has_base;
  float base, scale;
  bool operator==(const TurnedRows &) const = default;

  array original(const Arrays &in, mx::StreamOrDevice s) const {
    return own_rope(in[0], dims, traditional, has_base ? std::optional(base) : std::nullopt, scale, in[1], maybe(in, 2), s);
  }
  mx::Shape shape(const Arrays &in) const { return in[0].shape(); }
  void run(const Arrays &in, array &out, mx::cpu::CommandEncoder &encoder) const {
    array x = with_rows(in[0], encoder), offsets = whole(in[1], encoder);
    const float *periods = in.size() > 2 ? whole(in[2], encoder).data<float>() : nullptr;
    encoder.dispatch([self = *this, rows = Rows(x), d = x.shape(-1), length = x.shape(-2), batch = x.shape(0), type = type_of(x.dtype()), out = out.data<char>(),
                      bytes = out.itemsize() * x.shape(-1), offsets = offsets.data<int>(), count = offsets.size(), periods] {
      const int half = self.dims / 2;
      auto &a = Angles::of(half, length, self.base, self.scale, {offsets, offsets + count}, periods ? std::vector<float>(periods, periods + half) : std::vector<float>());
      const size_t rows_each = rows.count / batch;
      for (size_t row = 0; row < rows.count; row++) {
        const size_t at = ((count > 1 ? row / rows_each : 0) * length + row % length) * half;
        kernels->rope(rows[row], type, d, self.dims, self.traditional, &a.cosines[at], &a.sines[at], out + row * bytes);
      }
    });
  }
};

struct Elementwise {
  static constexpr const char *name = "FastFunction";
  int what;
  bool operator==(const Elementwise &) const = default;

  array original(const Arrays &in, mx::StreamOrDevice s) const {
    array y = what == TANH ? own_tanh(in[0], s) : what == EXP ? own_exp(in[0], s) : own_sigmoid(in[0], s);
    if (what == SILU) y = own_multiply(in[0], y, s);
    return in.size() > 1 ? own_multiply(y, in[1], s) : y;
  }
  mx::Shape shape(const Arrays &in) const { return in[0].shape(); }
  void run(const Arrays &in, array &out, mx::cpu::CommandEncoder &encoder) const {
    array x = whole(in[0], encoder);
    const float *factor = in.size() > 1 ? whole(in[1], encoder).data<float>() : nullptr;
    encoder.dispatch([what = what, x = x.data<float>(), factor, out = out.data<float>(), n = x.size()] {
      const size_t part = 1 << 14; /* a multiple of every width */
      each((int)((n + part - 1) / part), n > part && many > 1 ? WHOLLY : ALONE, [&](int i) {
        const size_t from = i * part;
        kernels->unary(what, x + from, factor ? factor + from : nullptr, out + from, std::min(part, n - from));
      });
    });
  }
};

struct RowSoftmax {
  static constexpr const char *name = "FastSoftmax";
  bool operator==(const RowSoftmax &) const = default;

  array original(const Arrays &in, mx::StreamOrDevice s) const { return own_softmax(in[0], {-1}, true, s); }
  mx::Shape shape(const Arrays &in) const { return in[0].shape(); }
  void run(const Arrays &in, array &out, mx::cpu::CommandEncoder &encoder) const {
    array x = with_rows(in[0], encoder);
    encoder.dispatch([rows = Rows(x), n = (size_t)x.shape(-1), out = out.data<float>()] {
      each((int)rows.count, shares(rows.count, rows.count * n * 4), [&](int row) { kernels->softmax((const float *)rows[row], out + row * n, n); });
    });
  }
};

/* Arrays one after the other along an axis, copied in whole pieces; MLX copies number by number. */
struct Joined {
  static constexpr const char *name = "FastConcatenate";
  int axis;
  bool operator==(const Joined &) const = default;

  array original(const Arrays &in, mx::StreamOrDevice s) const { return own_concatenate(in, axis, s); }
  mx::Shape shape(const Arrays &in) const {
    auto shape = in[0].shape();
    for (size_t i = 1; i < in.size(); i++) shape[axis] += in[i].shape(axis);
    return shape;
  }
  void run(const Arrays &in, array &out, mx::cpu::CommandEncoder &encoder) const {
    struct Part {
      Rows rows;
      size_t count, bytes; /* rows that follow each other in the result, and the bytes of one */
      bool gapless;
    };
    std::vector<Part> parts;
    for (const array &a : in) {
      array x = with_rows(a, encoder);
      const int last = (int)x.ndim() - 1;
      Part part{Rows(x), 1, x.itemsize() * x.shape(last), true};
      for (int i = last - 1; i >= axis; part.count *= x.shape(i--)) part.gapless = part.gapless && (x.shape(i) == 1 || x.strides()[i] == (int64_t)part.count * x.shape(last));
      parts.push_back(part);
    }
    int count = 1;
    for (int i = 0; i < axis; i++) count *= out.shape(i);
    encoder.dispatch([parts = std::move(parts), to = out.data<char>(), count, step = out.nbytes() / count] {
      each(count, shares(BRIEF_ROWS + 1, count * step / sizeof(float)), [&](int i) {
        char *p = to + i * step;
        for (const Part &part : parts) {
          const size_t pieces = part.gapless ? 1 : part.count, bytes = part.count / pieces * part.bytes;
          for (size_t piece = 0; piece < pieces; piece++, p += bytes) memcpy(p, part.rows[i * part.count + piece], bytes);
        }
      });
    });
  }
};

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
  if (w.ndim() < 3 || x.ndim() != w.ndim() || x.ndim() > MOST_AXES || x.dtype() != float32 || (packing.mode == AFFINE && scales.dtype() != float32) || w.size() == 0) return std::nullopt;
  if (!packing.fits(w, scales, biases, (size_t)scales.shape(-1) * packing.group) || !serves(s, x)) return std::nullopt;
  if (x.shape(-1) != (transpose ? scales.shape(-1) * packing.group : w.shape(-2))) return std::nullopt;
  auto without_matrix = [](Shape shape) { return shape.resize(shape.size() - 2), shape; };
  const Shape of_w = without_matrix(w.shape()), batch = broadcast_shapes(without_matrix(x.shape()), of_w);
  if (!transpose && batch != without_matrix(x.shape())) return std::nullopt;
  std::vector<uint32_t> chosen = {0};
  for (size_t axis = 0; axis < batch.size(); axis++) {
    std::vector<uint32_t> longer;
    for (uint32_t number : chosen)
      for (int i = 0; i < batch[axis]; i++) longer.push_back(number * of_w[axis] + (of_w[axis] > 1 ? i : 0));
    chosen = std::move(longer);
  }
  Arrays inputs = {x, w, scales, array(chosen.data(), batch, uint32)};
  if (biases) inputs.push_back(*biases);
  return transpose ? make(s, ExpertProduct{packing, false}, float32, std::move(inputs)) : make(s, PackedSum{packing}, float32, std::move(inputs));
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
  return make(s, ExpertProduct{*packing, true}, packing->mode == AFFINE ? promote_types(x.dtype(), scales.dtype()) : x.dtype(), std::move(inputs));
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
