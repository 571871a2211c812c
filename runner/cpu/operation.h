/* An operation of the kernels as a primitive of MLX, and what its parts share: threads, memory, rows of arrays, and
 * libmlx's own functions.
 *
 * Primitives allocate their output and put a task on the stream's queue; MLX keeps inputs and output until it has run.
 * libmlx's own primitives cannot be used as bases: their vtables are not exported. */
#pragma once
#include <dlfcn.h>

#include <algorithm>
#include <array>
#include <cmath>
#include <cstring>
#include <numeric>

#include "mlx/allocator.h"
#include "mlx/array.h"
#include "mlx/backend/cpu/encoder.h"
#include "mlx/compile.h"
#include "mlx/fast.h"
#include "mlx/ops.h"
#include "mlx/primitives.h"
#include "mlx/transforms.h"
#include "mlx/version.h"

#include "kernels.h"

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
  STATE_ROWS = 16,        /* of joined ones that are copied, at most, rather than kept with all others */
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

/* Calls f with each of `rows` rows, in parts of `part` rows; `work` is what all take, in multiplications. */
template <typename F> void each_row(size_t rows, size_t part, size_t work, const F &f) {
  each((int)((rows + part - 1) / part), shares(rows, work), [&](int i) {
    for (size_t row = i * part; row < std::min(rows, (i + 1) * part); row++) f(row);
  });
}

void allocate(array &a) { a.set_data(mx::allocator::malloc(a.nbytes())); }

array temporary(mx::Shape shape, mx::Dtype type, mx::cpu::CommandEncoder &encoder) {
  array a(std::move(shape), type, nullptr, {});
  allocate(a);
  encoder.add_temporary(a);
  return a;
}
/* Memory for `rows` rows of k numbers while an operation runs. */
float *room_for(size_t rows, size_t k, mx::cpu::CommandEncoder &encoder) {
  return aligned(temporary({(int)rows + 1, (int)std::max<size_t>(k, LINE / sizeof(float))}, mx::float32, encoder).data<float>());
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
/* For each matrix of a batch, in order: the number of that of `a` [..., rows, columns], whose leading axes are broadcast. */
std::vector<uint32_t> numbers_of(const array &a, const mx::Shape &batch) {
  const int missing = (int)batch.size() + 2 - (int)a.ndim();
  std::vector<uint32_t> numbers = {0};
  for (int axis = 0; axis < (int)batch.size(); axis++) {
    const int length = axis < missing ? 1 : a.shape(axis - missing);
    std::vector<uint32_t> longer;
    for (uint32_t number : numbers)
      for (int i = 0; i < batch[axis]; i++) longer.push_back(number * length + (length > 1 ? i : 0));
    numbers = std::move(longer);
  }
  return numbers;
}
uint32_t matrices_of(const array &a) { return a.size() / ((size_t)a.shape(-1) * a.shape(-2)); }
array with_matrices(const array &a, mx::cpu::CommandEncoder &encoder) { return fitting(a, matrix_stride(a).has_value(), encoder); }
array with_rows(const array &a, mx::cpu::CommandEncoder &encoder) { return fitting(a, has_rows(a), encoder); }

/* An operation with several outputs: it has `shapes`, allocates them itself, and has no gradients. */
template <typename Operation> concept Several = requires(const Operation &operation, const Arrays &in) { operation.shapes(in); };

/* A primitive for one operation: a value with `name`, `run`, `shape`, equality, and libmlx's `original` for gradients. If it
 * has `in_place`, the result may take the place of the first input, which is as large. */
template <typename Operation> class Fast : public mx::Primitive {
 public:
  const Operation operation;

  Fast(mx::Stream stream, Operation operation) : Primitive(stream), operation(std::move(operation)) {}
  const char *name() const override { return Operation::name; }
  void eval_cpu(const Arrays &in, Arrays &out) override {
    constexpr bool own_table = requires { operation.table; };
    if (!own_table && !kernels) throw std::runtime_error("The kernels were switched off after this operation was made.");
    calls++;
    auto &encoder = mx::cpu::get_command_encoder(stream());
    if constexpr (Several<Operation>) {
      operation.run(in, out, encoder);
    } else {
      if (requires { Operation::in_place; } && in[0].is_donatable() && in[0].flags().row_contiguous) out[0].copy_shared_buffer(in[0]);
      else allocate(out[0]);
      operation.run(in, out[0], encoder);
    }
  }
  void eval_gpu(const Arrays &, Arrays &) override { throw std::runtime_error("This operation was made for a CPU stream."); }
  bool is_equivalent(const mx::Primitive &other) const override {
    auto *same = dynamic_cast<const Fast *>(&other);
    return same && same->operation == operation;
  }
  std::vector<mx::Shape> output_shapes(const Arrays &in) override {
    if constexpr (Several<Operation>) return operation.shapes(in);
    else return {operation.shape(in)};
  }
  Arrays original(const Arrays &in) {
    if constexpr (Several<Operation>) throw std::runtime_error("This operation has no gradients.");
    else return {operation.original(in, stream())};
  }
  Arrays vjp(const Arrays &primals, const Arrays &cotangents, const std::vector<int> &argnums, const Arrays &) override {
    Arrays chosen;
    for (int i : argnums) chosen.push_back(primals[i]);
    auto f = [&](const Arrays &x) {
      Arrays in = primals;
      for (size_t i = 0; i < argnums.size(); i++) in[argnums[i]] = x[i];
      return original(in);
    };
    return mx::vjp(f, chosen, cotangents).second;
  }
  std::pair<Arrays, std::vector<int>> vmap(const Arrays &in, const std::vector<int> &axes) override {
    auto out = mx::vmap([&](const Arrays &x) { return original(x); }, axes)(in);
    return {out, {0}};
  }
};

template <typename Operation> array make(mx::StreamOrDevice s, Operation operation, mx::Dtype type, Arrays inputs) {
  auto shape = operation.shape(inputs);
  auto primitive = std::make_shared<Fast<Operation>>(mx::to_stream(s), std::move(operation));
  return array(std::move(shape), type, std::move(primitive), std::move(inputs));
}

template <Several Operation> Arrays make(mx::StreamOrDevice s, Operation operation, Arrays inputs) {
  auto shapes = operation.shapes(inputs);
  auto types = operation.types();
  return array::make_arrays(std::move(shapes), types, std::make_shared<Fast<Operation>>(mx::to_stream(s), std::move(operation)), inputs);
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
using Ints = std::vector<int>;
using ConvolvedGenerally = array(array, array, Ints, Ints, Ints, Ints, Ints, int, bool, mx::StreamOrDevice);
using SliceOf = array(const array &, mx::Shape, mx::Shape, mx::Shape, mx::StreamOrDevice);
using JoinedAlong = array(std::vector<array>, int, mx::StreamOrDevice);
using OfAxes = array(const array &, const std::vector<int> &, bool, mx::StreamOrDevice);
using PartitionedAlong = array(const array &, int, int, mx::StreamOrDevice);

const auto own_quantized_matmul = libmlx(&mx::quantized_matmul);
const auto own_gather_qmm = libmlx(&mx::gather_qmm);
const auto own_dequantize = libmlx(&mx::dequantize);
const auto own_sigmoid = libmlx(&mx::sigmoid);
const auto own_tanh = libmlx(&mx::tanh);
const auto own_expm1 = libmlx(&mx::expm1);
const auto own_exp = libmlx(&mx::exp);
const auto own_logaddexp = libmlx(&mx::logaddexp);
const auto own_multiply = libmlx(&mx::multiply);
const auto own_add = libmlx(&mx::add);
const auto own_conv1d = libmlx(&mx::conv1d);
const auto own_conv_general = libmlx((ConvolvedGenerally *)&mx::conv_general);
const auto own_slice = libmlx((SliceOf *)&mx::slice);
const auto own_contiguous = libmlx(&mx::contiguous);
const auto own_subtract = libmlx(&mx::subtract);
const auto own_divide = libmlx(&mx::divide);
const auto own_maximum = libmlx(&mx::maximum);
const auto own_minimum = libmlx(&mx::minimum);
const auto own_clip = libmlx(&mx::clip);
const auto own_negative = libmlx(&mx::negative);
const auto own_square = libmlx(&mx::square);
const auto own_power = libmlx(&mx::power);
const auto own_erf = libmlx(&mx::erf);
const auto own_concatenate = libmlx((JoinedAlong *)&mx::concatenate);
const auto own_softmax = libmlx((OfAxes *)&mx::softmax);
const auto own_sum = libmlx((OfAxes *)&mx::sum);
const auto own_argpartition = libmlx((PartitionedAlong *)&mx::argpartition);
const auto own_take_along_axis = libmlx(&mx::take_along_axis);
const auto own_stop_gradient = libmlx(&mx::stop_gradient);
const auto own_matmul = libmlx(&mx::matmul);
const auto own_addmm = libmlx(&mx::addmm);
const auto own_rms_norm = libmlx(&mx::fast::rms_norm);
const auto own_layer_norm = libmlx(&mx::fast::layer_norm);
const auto own_rope = libmlx((RopeFromArray *)&mx::fast::rope);
const auto own_attention = libmlx(&mx::fast::scaled_dot_product_attention);
const auto own_cuda_kernel = libmlx(&mx::fast::cuda_kernel);

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

}  // namespace
