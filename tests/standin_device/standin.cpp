// A device for tests: its tensors are of torch's PrivateUse1 kind and lie in this process's memory, and what has no kernel
// here is computed by the CPU's. Torch takes it for an accelerator of another maker.

#include <ATen/CPUGeneratorImpl.h>
#include <ATen/EmptyTensor.h>
#include <ATen/core/Tensor.h>
#include <ATen/detail/PrivateUse1HooksInterface.h>
#include <ATen/native/CPUFallback.h>
#include <ATen/native/transformers/attention.h>
#include <ATen/native/transformers/sdp_utils_cpp.h>
#include <ATen/ops/_reshape_alias_native.h>
#include <ATen/ops/as_strided_native.h>
#include <ATen/ops/from_blob.h>
#include <ATen/ops/resize_native.h>
#include <ATen/ops/set_native.h>
#include <ATen/ops/unfold_native.h>
#include <ATen/ops/view_native.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>
#include <torch/library.h>

#include <atomic>
#include <cstdlib>
#include <cstring>

namespace {

constexpr auto KIND = c10::DeviceType::PrivateUse1;
constexpr auto KEY = c10::DispatchKey::PrivateUse1;
constexpr int COUNT = 4;

thread_local c10::DeviceIndex current = 0;

c10::Device current_device() { return {KIND, current}; }

// Memory

struct Memory {
  std::atomic<int64_t> allocated{0}, peak{0}, limit{0};
};

Memory memories[COUNT];

struct Block {
  void* start;
  int64_t size;
  c10::DeviceIndex device;
};

void free_block(void* context) {
  auto* block = static_cast<Block*>(context);
  memories[block->device].allocated -= block->size;
  std::free(block->start);
  delete block;
}

struct Allocator final : c10::Allocator {
  c10::DataPtr allocate(size_t bytes) override {
    const auto size = static_cast<int64_t>(bytes);
    auto& memory = memories[current];
    const auto now = memory.allocated += size;
    if (memory.limit > 0 && now > memory.limit) {
      memory.allocated -= size;
      TORCH_CHECK(false, "STANDIN out of memory. Tried to allocate ", size, " bytes");
    }
    for (auto before = memory.peak.load(); before < now && !memory.peak.compare_exchange_weak(before, now);) {
    }
    auto* block = new Block{std::malloc(bytes ? bytes : 1), size, current};
    return {block->start, block, &free_block, current_device()};
  }
  c10::DeleterFnPtr raw_deleter() const override {
    return nullptr;  // what is freed is not what tensors point to
  }
  void copy_data(void* to, const void* from, std::size_t size) const override {
    std::memcpy(to, from, size);
  }
};

Allocator allocator;
REGISTER_ALLOCATOR(KIND, &allocator);

// Devices: they compute in the program's own thread, and have no streams

struct Guard final : c10::impl::NoOpDeviceGuardImpl<KIND> {
  c10::Device exchangeDevice(c10::Device device) const override {
    const auto before = current_device();
    uncheckedSetDevice(device);
    return before;
  }
  c10::Device getDevice() const override { return current_device(); }
  void setDevice(c10::Device device) const override {
    TORCH_CHECK(device.index() < COUNT, "there is no ", device);
    uncheckedSetDevice(device);
  }
  void uncheckedSetDevice(c10::Device device) const noexcept override {
    if (device.index() >= 0) {
      current = device.index();
    }
  }
  c10::Stream getStream(c10::Device device) const noexcept override {
    return c10::Stream(c10::Stream::DEFAULT, device);
  }
  c10::Stream exchangeStream(c10::Stream stream) const noexcept override { return stream; }
  c10::DeviceIndex deviceCount() const noexcept override { return COUNT; }
  // Futures of collectives record events.
  void record(void**, const c10::Stream&, const c10::DeviceIndex, const c10::EventFlag) const override {}
  void block(void*, const c10::Stream&) const override {}
};
C10_REGISTER_GUARD_IMPL(PrivateUse1, Guard);

// Random numbers: each device has a generator of its own, as GPUs have.

const at::Generator& generator(int64_t device) {
  static at::Generator all[COUNT] = {
      at::detail::createCPUGenerator(0), at::detail::createCPUGenerator(0), at::detail::createCPUGenerator(0),
      at::detail::createCPUGenerator(0)};
  return all[device < 0 ? current : device];
}

struct Hooks final : at::PrivateUse1HooksInterface {
  bool isBuilt() const override { return true; }
  bool isAvailable() const override { return true; }
  bool hasPrimaryContext(c10::DeviceIndex) const override { return true; }
  const at::Generator& getDefaultGenerator(c10::DeviceIndex device) const override { return generator(device); }
  at::Generator getNewGenerator(c10::DeviceIndex) const override { return at::detail::createCPUGenerator(); }
  void resizePrivateUse1Bytes(const c10::Storage& storage, size_t size) const override {
    auto fresh = allocator.allocate(size);
    std::memcpy(fresh.get(), storage.data(), std::min(size, storage.nbytes()));
    storage.set_data_ptr(std::move(fresh));
    storage.unsafeGetStorageImpl()->set_nbytes(size);
  }
};

// Kernels

// The same memory as a tensor of the CPU, which keeps it.
at::Tensor on_host(const at::Tensor& tensor) {
  if (tensor.device().type() != KIND) {
    return tensor;
  }
  return at::from_blob(
      const_cast<void*>(tensor.const_data_ptr()), tensor.sizes(), tensor.strides(), [tensor](void*) {},
      at::TensorOptions(at::kCPU).dtype(tensor.dtype()));
}

at::Tensor empty(
    c10::IntArrayRef size, std::optional<at::ScalarType> dtype, std::optional<at::Layout>,
    std::optional<at::Device> device, std::optional<bool>, std::optional<at::MemoryFormat> format) {
  c10::OptionalDeviceGuard guard(device);
  return at::detail::empty_generic(size, &allocator, c10::DispatchKeySet(KEY), c10::dtype_or_default(dtype), format);
}

at::Tensor empty_strided(
    c10::IntArrayRef size, c10::IntArrayRef stride, std::optional<at::ScalarType> dtype, std::optional<at::Layout>,
    std::optional<at::Device> device, std::optional<bool>) {
  c10::OptionalDeviceGuard guard(device);
  return at::detail::empty_strided_generic(
      size, stride, &allocator, c10::DispatchKeySet(KEY), c10::dtype_or_default(dtype));
}

at::Tensor copy_from(const at::Tensor& source, const at::Tensor& target, bool) {
  on_host(target).copy_(on_host(source));
  return target;
}

at::Tensor copy_from_and_resize(const at::Tensor& source, const at::Tensor& target) {
  if (target.sizes() != source.sizes()) {
    target.resize_(source.sizes());
  }
  return copy_from(source, target, false);
}

at::Scalar local_scalar(const at::Tensor& tensor) { return on_host(tensor).item(); }

at::Tensor& set_storage(
    at::Tensor& result, at::Storage storage, int64_t offset, c10::IntArrayRef size, c10::IntArrayRef stride) {
  return at::native::set_storage_cpu_(result, storage, offset, size, stride);
}

const at::Tensor& resize(const at::Tensor& tensor, c10::IntArrayRef size, std::optional<at::MemoryFormat> format) {
  return at::native::resize_(tensor, size, format);
}

int64_t attention(
    const at::Tensor&, const at::Tensor&, const at::Tensor&, const std::optional<at::Tensor>&, double, bool,
    std::optional<double>, bool) {
  return static_cast<int64_t>(sdp::SDPBackend::math);
}

void by_the_cpu(const c10::OperatorHandle& op, torch::jit::Stack* stack) {
  const auto& arguments = op.schema().arguments();
  for (size_t i = 0; i < arguments.size(); ++i) {
    auto& value = (*stack)[stack->size() - arguments.size() + i];
    if (arguments[i].name() == "generator" && value.isNone()) {
      value = generator(-1);
    }
  }
  at::native::cpu_fallback(op, stack, /*error_on_views=*/true);
}

TORCH_LIBRARY_IMPL(aten, PrivateUse1, m) {
  m.impl("empty.memory_format", TORCH_FN(empty));
  m.impl("empty_strided", TORCH_FN(empty_strided));
  m.impl("as_strided", TORCH_FN(at::native::as_strided_tensorimpl));
  m.impl("view", TORCH_FN(at::native::view));
  m.impl("unfold", TORCH_FN(at::native::unfold));
  m.impl("_reshape_alias", TORCH_FN(at::native::_reshape_alias));
  m.impl("resize_", TORCH_FN(resize));
  m.impl("set_.source_Storage", TORCH_FN(at::native::set_));
  m.impl("set_.source_Storage_storage_offset", TORCH_FN(set_storage));
  m.impl("set_.source_Tensor", TORCH_FN(at::native::set_tensor_));
  m.impl("_copy_from", TORCH_FN(copy_from));
  m.impl("_copy_from_and_resize", TORCH_FN(copy_from_and_resize));
  m.impl("_local_scalar_dense", TORCH_FN(local_scalar));
}

TORCH_LIBRARY_IMPL(_, PrivateUse1, m) { m.fallback(torch::CppFunction::makeFromBoxedFunction<&by_the_cpu>()); }

// What the Python module asks for

TORCH_LIBRARY(standin, m) {
  m.def("count() -> int", []() -> int64_t { return COUNT; });
  m.def("current() -> int", []() -> int64_t { return current; });
  m.def("set_current(int device) -> ()", [](int64_t device) { Guard().setDevice({KIND, static_cast<int8_t>(device)}); });
  m.def("peak(int device) -> int", [](int64_t device) { return memories[device].peak.load(); });
  m.def("set_limit(int device, int bytes) -> ()", [](int64_t device, int64_t bytes) { memories[device].limit = bytes; });
  m.def("seed(int device, int seed) -> ()", [](int64_t device, int64_t seed) {
    auto one = generator(device);
    one.set_current_seed(static_cast<uint64_t>(seed));
  });
  m.def("state(int device) -> Tensor", [](int64_t device) { return generator(device).get_state(); });
  m.def("set_state(int device, Tensor state) -> ()", [](int64_t device, const at::Tensor& state) {
    auto one = generator(device);
    one.set_state(state);
  });
  m.def("on_host(Tensor tensor) -> Tensor", &on_host);
}

const bool registered = [] {
  static Hooks hooks;
  at::RegisterPrivateUse1HooksInterface(&hooks);
  return true;
}();

}  // namespace

namespace at::native {
REGISTER_PRIVATEUSE1_DISPATCH(_fused_sdp_choice_stub, &attention)
}
