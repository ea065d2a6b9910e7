// A CUDA device for a torch without CUDA: its memory is the host's, and the CPU's kernels compute on it.
//
// Tensors of this device are of another type than the CPU's, so torch rejects an operation that mixes both, as
// it does on a GPU. An operation without a kernel of its own (all but copies and allocations) runs on CPU
// tensors that describe the same memory; what it returns becomes a tensor of the device again.

#include <ATen/CPUGeneratorImpl.h>
#include <ATen/Context.h>
#include <ATen/EmptyTensor.h>
#include <ATen/NativeFunctions.h>
#include <ATen/Operators.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/detail/CUDAHooksInterface.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/from_blob.h>
#include <c10/core/Allocator.h>
#include <c10/core/CPUAllocator.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>
#include <torch/library.h>

#include <algorithm>
#include <atomic>
#include <cstdlib>
#include <cstring>
#include <mutex>
#include <unordered_set>

namespace {

using at::Tensor;
using c10::Device;
using c10::DeviceIndex;
using c10::DeviceType;
using c10::Stream;

// The number of devices of this process, and the one on which the calling thread makes tensors.
const DeviceIndex device_count = [] {
  const char* given = std::getenv("FTD_EMULATED_GPUS");
  return static_cast<DeviceIndex>(given == nullptr ? 1 : std::atoi(given));
}();
thread_local DeviceIndex current_index = 0;

Device current() { return Device(DeviceType::CUDA, current_index); }

Device checked(Device device) {
  TORCH_CHECK(device.index() < device_count, "CUDA error: invalid device ordinal");
  return device.has_index() ? device : current();
}

// Makes a device the current one, as long as this object lives.
class On {
 public:
  explicit On(Device device) : before_(current_index) { current_index = checked(device).index(); }
  ~On() { current_index = before_; }
  On(const On&) = delete;
  On& operator=(const On&) = delete;

 private:
  DeviceIndex before_;
};

// --- Memory --------------------------------------------------------------------------------------------------

std::atomic<int64_t> allocated_bytes{0};
std::atomic<int64_t> peak_bytes{0};

// Memory of the device: either of its own, or of a CPU tensor that an operation returned.
struct Block {
  size_t size_bytes;
  c10::DataPtr memory;
};

c10::DataPtr owned(size_t size_bytes, c10::DataPtr memory) {
  void* address = memory.get();
  auto* block = new Block{size_bytes, std::move(memory)};
  int64_t now = allocated_bytes += static_cast<int64_t>(size_bytes);
  int64_t peak = peak_bytes;
  while (now > peak && !peak_bytes.compare_exchange_weak(peak, now)) {
  }
  return {address, block, [](void* context) {
            auto* ended = static_cast<Block*>(context);
            allocated_bytes -= static_cast<int64_t>(ended->size_bytes);
            delete ended;
          },
          current()};
}

struct DeviceAllocator final : c10::Allocator {
  c10::DataPtr allocate(size_t size_bytes) override {
    return owned(size_bytes, c10::GetCPUAllocator()->allocate(size_bytes));
  }
  c10::DeleterFnPtr raw_deleter() const override { return nullptr; }
  void copy_data(void* target, const void* source, size_t count) const final {
    default_copy_data(target, source, count);
  }
};

DeviceAllocator device_allocator;
REGISTER_ALLOCATOR(DeviceType::CUDA, &device_allocator);

// Host memory from which a GPU could copy without the host. Every start of such memory is known.
std::mutex pinned_lock;
std::unordered_set<const void*> pinned_starts;

struct PinnedAllocator final : c10::Allocator {
  c10::DataPtr allocate(size_t size_bytes) override {
    auto memory = c10::GetCPUAllocator()->allocate(std::max<size_t>(size_bytes, 1));
    void* address = memory.get();
    std::lock_guard<std::mutex> hold(pinned_lock);
    pinned_starts.insert(address);
    return {address, new c10::DataPtr(std::move(memory)), [](void* context) {
              auto* ended = static_cast<c10::DataPtr*>(context);
              {
                std::lock_guard<std::mutex> hold(pinned_lock);
                pinned_starts.erase(ended->get());
              }
              delete ended;
            },
            Device(DeviceType::CPU)};
  }
  c10::DeleterFnPtr raw_deleter() const override { return nullptr; }
  void copy_data(void* target, const void* source, size_t count) const final {
    default_copy_data(target, source, count);
  }
};

PinnedAllocator pinned_allocator;

// --- Streams and hooks ---------------------------------------------------------------------------------------

// Work is complete when it is given, so that streams and events have nothing to do.
struct DeviceGuard final : c10::impl::DeviceGuardImplInterface {
  DeviceType type() const override { return DeviceType::CUDA; }
  Device exchangeDevice(Device device) const override {
    auto before = current();
    setDevice(device);
    return before;
  }
  Device getDevice() const override { return current(); }
  void setDevice(Device device) const override { current_index = checked(device).index(); }
  void uncheckedSetDevice(Device device) const noexcept override { current_index = device.index(); }
  Stream getStream(Device device) const override { return Stream(Stream::DEFAULT, device); }
  Stream getDefaultStream(Device device) const override { return Stream(Stream::DEFAULT, device); }
  Stream getNewStream(Device device, int) const override { return Stream(Stream::DEFAULT, device); }
  Stream exchangeStream(Stream stream) const override { return stream; }
  DeviceIndex deviceCount() const noexcept override { return device_count; }
  void record(void**, const Stream&, DeviceIndex, c10::EventFlag) const override {}
  void block(void*, const Stream&) const override {}
  bool queryEvent(void*) const override { return true; }
  void destroyEvent(void*, DeviceIndex) const noexcept override {}
  bool queryStream(const Stream&) const override { return true; }
  void synchronizeStream(const Stream&) const override {}
  void synchronizeEvent(void*) const override {}
  void synchronizeDevice(DeviceIndex) const override {}
  void recordDataPtrOnStream(const c10::DataPtr&, const Stream&) const override {}
};

C10_REGISTER_GUARD_IMPL(CUDA, DeviceGuard);

// A generator of the device, which draws the numbers that a CPU's generator with this seed draws. The CPU's kernels
// take it only while it says that it is the CPU's.
struct DeviceGenerator final : at::CPUGeneratorImpl {
  DeviceGenerator() { lend(false); }
  void lend(bool lent) { device_ = lent ? Device(DeviceType::CPU) : Device(DeviceType::CUDA, 0); }
  std::recursive_mutex in_use;
};

const at::Generator& default_generator() {
  static const at::Generator generator = at::make_generator<DeviceGenerator>();
  return generator;
}

// Lends a generator to the CPU's kernels, to one thread at a time.
class Lent {
 public:
  explicit Lent(at::Generator generator) : generator_(std::move(generator)) {
    TORCH_CHECK(
        generator_.device().is_cuda(), "Expected a 'cuda' device type for generator but found '",
        generator_.device().type(), "'");
    auto* own = generator_.get<DeviceGenerator>();
    hold_ = std::unique_lock(own->in_use);
    own->lend(true);
  }
  Lent(Lent&&) = default;
  ~Lent() {
    if (hold_.owns_lock()) {
      generator_.get<DeviceGenerator>()->lend(false);
    }
  }

 private:
  at::Generator generator_;
  std::unique_lock<std::recursive_mutex> hold_;
};

struct DeviceHooks final : at::CUDAHooksInterface {
  explicit DeviceHooks(at::CUDAHooksArgs) {}
  void init() const override {}
  bool isBuilt() const override { return true; }
  bool isAvailable() const override { return true; }
  bool hasCUDA() const override { return true; }
  bool hasPrimaryContext(DeviceIndex) const override { return true; }
  DeviceIndex current_device() const override { return current_index; }
  DeviceIndex deviceCount() const override { return device_count; }
  DeviceIndex getCurrentDevice() const override { return current_index; }
  int getNumGPUs() const override { return device_count; }
  void deviceSynchronize(DeviceIndex) const override {}
  Device getDeviceFromPtr(void*) const override { return current(); }
  at::Allocator* getPinnedMemoryAllocator() const override { return &pinned_allocator; }
  at::Allocator* getCUDADeviceAllocator() const override { return &device_allocator; }
  bool isPinnedPtr(const void* address) const override {
    std::lock_guard<std::mutex> hold(pinned_lock);
    return pinned_starts.count(address) != 0;
  }
  const at::Generator& getDefaultGenerator(DeviceIndex) const override { return default_generator(); }
  at::Generator getNewGenerator(DeviceIndex) const override { return at::make_generator<DeviceGenerator>(); }
};

at::RegistererCUDAHooksRegistry register_hooks(
    "CUDAHooks", at::CUDAHooksRegistry(), at::RegistererCUDAHooksRegistry::DefaultCreator<DeviceHooks>);

// --- Tensors -------------------------------------------------------------------------------------------------

// A CPU tensor of the memory of a device's tensor. An empty one can be resized, since an operation may fill it.
Tensor on_cpu(const Tensor& tensor) {
  if (tensor.numel() == 0) {
    return at::empty(tensor.sizes(), tensor.options().device(DeviceType::CPU).requires_grad(false));
  }
  auto keep = tensor.storage();
  return at::from_blob(
      tensor.data_ptr(), tensor.sizes(), tensor.strides(), [keep](void*) {},
      tensor.options().device(DeviceType::CPU).requires_grad(false));
}

Tensor on_device(c10::Storage storage, const Tensor& like, int64_t offset) {
  auto made = at::detail::make_tensor<c10::TensorImpl>(
      std::move(storage), c10::DispatchKeySet(c10::DispatchKey::CUDA), like.dtype());
  made.unsafeGetTensorImpl()->set_sizes_and_strides(like.sizes(), like.strides(), offset);
  return made;
}

struct Alias {
  Tensor original;
  Tensor cpu;
};

Tensor empty_strided(
    c10::IntArrayRef size, c10::IntArrayRef stride, std::optional<at::ScalarType> dtype,
    std::optional<at::Layout>, std::optional<Device> device, std::optional<bool>) {
  const On asked(device.value_or(current()));
  return at::detail::empty_strided_generic(
      size, stride, &device_allocator, c10::DispatchKeySet(c10::DispatchKey::CUDA), c10::dtype_or_default(dtype));
}

Tensor empty(
    c10::IntArrayRef size, std::optional<at::ScalarType> dtype, std::optional<at::Layout>,
    std::optional<Device> device, std::optional<bool>, std::optional<at::MemoryFormat> format) {
  const On asked(device.value_or(current()));
  return at::detail::empty_generic(
      size, &device_allocator, c10::DispatchKeySet(c10::DispatchKey::CUDA), c10::dtype_or_default(dtype), format);
}

Tensor as_cpu(const Tensor& tensor) { return tensor.device().is_cpu() ? tensor : on_cpu(tensor); }

Tensor& copy_(Tensor& self, const Tensor& source, bool) {
  auto target = as_cpu(self);
  at::_ops::copy_::redispatch(c10::DispatchKeySet(c10::DispatchKey::CPU), target, as_cpu(source), false);
  return self;
}

Tensor copy_from(const Tensor& self, const Tensor& target, bool) {
  auto written = target;
  return copy_(written, self, false);
}

const Tensor& resize_(const Tensor& self, c10::IntArrayRef size, std::optional<at::MemoryFormat> format) {
  TORCH_CHECK(!format.has_value(), "resize_ with a memory format is not emulated");
  auto* impl = self.unsafeGetTensorImpl();
  impl->set_sizes_contiguous(size);
  auto needed = at::detail::computeStorageNbytesContiguous(size, self.dtype().itemsize(), self.storage_offset());
  if (needed > self.storage().nbytes()) {
    const On device(self.device());
    auto larger = device_allocator.allocate(needed);
    if (self.storage().nbytes() > 0) {
      std::memcpy(larger.get(), self.storage().data(), self.storage().nbytes());
    }
    self.storage().set_data_ptr_noswap(std::move(larger));
    self.storage().set_nbytes(needed);
  }
  return self;
}

// Take over what an operation wrote to an empty tensor.
void filled(const Alias& alias) {
  if (!alias.cpu.sizes().equals(alias.original.sizes())) {
    resize_(alias.original, alias.cpu.sizes(), std::nullopt);
    auto target = alias.original;
    copy_(target, alias.cpu, false);
  }
}

// The device's tensor for a CPU tensor that an operation returned: an argument, a view of one, or a new one.
Tensor returned(const Tensor& result, const std::vector<Alias>& aliases) {
  if (!result.defined() || !result.device().is_cpu()) {
    return result;
  }
  for (const auto& alias : aliases) {
    if (result.is_same(alias.cpu)) {
      filled(alias);
      return alias.original;
    }
  }
  for (const auto& alias : aliases) {
    if (result.storage().is_alias_of(alias.cpu.storage())) {
      return on_device(
          alias.original.storage(), result, alias.original.storage_offset() + result.storage_offset());
    }
  }
  const auto& storage = result.storage();
  size_t size_bytes = storage.nbytes();
  auto* held = new c10::Storage(storage);
  c10::DataPtr memory(
      held->mutable_data(), held, [](void* context) { delete static_cast<c10::Storage*>(context); },
      Device(DeviceType::CPU));
  auto own = c10::make_intrusive<c10::StorageImpl>(
      c10::StorageImpl::use_byte_size_t(), size_bytes, owned(size_bytes, std::move(memory)), &device_allocator,
      /*resizable=*/true);
  return on_device(c10::Storage(std::move(own)), result, result.storage_offset());
}

// Operations whose indices may be in host memory while the values are on the device.
bool may_mix(const std::string& name) {
  static const std::unordered_set<std::string> names = {
      "aten::index.Tensor", "aten::index_put", "aten::index_put_", "aten::_index_put_impl_"};
  return names.count(name) != 0;
}

const auto optional_generator = c10::OptionalType::create(c10::GeneratorType::get());

void run_on_cpu(const c10::OperatorHandle& op, torch::jit::Stack* stack) {
  const auto& schema = op.schema();
  const auto count = schema.arguments().size();
  const auto first = stack->size() - count;
  const auto name = c10::toString(op.operator_name());
  std::vector<Alias> aliases;
  std::vector<Lent> lent;
  auto asked = current();

  auto placed = [&](const Tensor& tensor) -> Tensor {
    if (!tensor.defined()) {
      return tensor;
    }
    if (tensor.device().is_cpu()) {
      TORCH_CHECK(
          tensor.dim() == 0 || may_mix(name),
          "Expected all tensors to be on the same device, but found at least two devices, cuda:0 and cpu! (",
          name, ")");
      return tensor;
    }
    for (const auto& alias : aliases) {
      TORCH_CHECK(
          tensor.device() == alias.original.device(),
          "Expected all tensors to be on the same device, but found at least two devices, ", tensor.device(), " and ",
          alias.original.device(), "! (", name, ")");
      if (alias.original.is_same(tensor)) {
        return alias.cpu;
      }
    }
    aliases.push_back({tensor, on_cpu(tensor)});
    return aliases.back().cpu;
  };

  for (size_t i = first; i < stack->size(); ++i) {
    auto& value = (*stack)[i];
    if (value.isTensor()) {
      value = placed(value.toTensor());
    } else if (value.isTensorList()) {
      std::vector<Tensor> tensors;
      for (const Tensor& tensor : value.toTensorVector()) {
        tensors.push_back(placed(tensor));
      }
      value = c10::IValue(tensors);
    } else if (value.isOptionalTensorList()) {
      c10::List<std::optional<Tensor>> tensors;
      for (const auto& tensor : value.toOptionalTensorVector()) {
        tensors.push_back(tensor.has_value() ? std::optional<Tensor>(placed(*tensor)) : std::nullopt);
      }
      value = c10::IValue(tensors);
    } else if (value.isDevice()) {
      asked = value.toDevice();
      value = Device(DeviceType::CPU);
    } else if (value.isGenerator()) {
      lent.emplace_back(value.toGenerator());
    } else if (value.isNone() && schema.arguments()[i - first].type()->isSubtypeOf(*optional_generator)) {
      lent.emplace_back(default_generator());
      value = default_generator();
    }
  }

  op.redispatchBoxed(c10::DispatchKeySet(c10::DispatchKey::CPU), stack);

  const On device(aliases.empty() ? asked : aliases.front().original.device());

  for (auto i = stack->size() - schema.returns().size(); i < stack->size(); ++i) {
    auto& value = (*stack)[i];
    if (value.isTensor()) {
      value = returned(value.toTensor(), aliases);
    } else if (value.isTensorList()) {
      std::vector<Tensor> tensors;
      for (const Tensor& tensor : value.toTensorVector()) {
        tensors.push_back(returned(tensor, aliases));
      }
      value = c10::IValue(tensors);
    }
  }
}

// Attention is computed by plain operations (0): the CPU's own choice would be a kernel that refuses this device.
int64_t attention_choice(
    const Tensor&, const Tensor&, const Tensor&, const std::optional<Tensor>&, double, bool, std::optional<double>,
    bool) {
  return 0;
}

TORCH_LIBRARY_IMPL(_, CUDA, library) {
  library.fallback(torch::CppFunction::makeFromBoxedFunction<&run_on_cpu>());
}

TORCH_LIBRARY_IMPL(aten, CUDA, library) {
  library.impl("empty.memory_format", empty);
  library.impl("empty_strided", empty_strided);
  library.impl("copy_", copy_);
  library.impl("_copy_from", copy_from);
  library.impl("resize_", resize_);
  library.impl("as_strided", at::native::as_strided_tensorimpl);
  library.impl("view", at::native::view);
  library.impl("_reshape_alias", at::native::_reshape_alias);
  library.impl("set_.source_Storage", [](Tensor& self, c10::Storage source) -> Tensor& {
    return at::native::set_(self, std::move(source));
  });
  library.impl("set_.source_Storage_storage_offset", at::native::set_storage_cpu_);
  library.impl("set_.source_Tensor", at::native::set_tensor_);
  library.impl("set_", at::native::set_cpu_);
  library.impl("_fused_sdp_choice", attention_choice);
  // The generic kernels would choose a GPU's.
  for (const auto* name : {"convolution", "convolution_backward"}) {
    library.impl(name, torch::CppFunction::makeFromBoxedFunction<&run_on_cpu>());
  }
  // Torch's own kernel for any device would come before the fallback: it allocates the result on the device, as
  // large as a GPU's kernel needs it, which is not always as large as the CPU's does.
  for (const auto& name : c10::Dispatcher::singleton().getAllOpNames()) {
    auto op = c10::Dispatcher::singleton().findOp(name);
    if (op.has_value() && name.getNamespace() == "aten" && op->hasKernelForDispatchKey(c10::DispatchKey::CPU) &&
        !op->hasKernelForDispatchKey(c10::DispatchKey::CUDA)) {
      library.impl(
          c10::toString(name).c_str(), torch::CppFunction::makeFromBoxedFunction<&run_on_cpu>());
    }
  }
}

}  // namespace

TORCH_LIBRARY(emulated_gpu, library) {
  library.def("count() -> int", []() -> int64_t { return device_count; });
  library.def("current_index() -> int", []() -> int64_t { return current_index; });
  library.def("set_index(int index) -> ()", [](int64_t index) {
    current_index = checked(Device(DeviceType::CUDA, static_cast<DeviceIndex>(index))).index();
  });
  library.def("allocated_bytes() -> int", []() -> int64_t { return allocated_bytes; });
  library.def("peak_bytes() -> int", []() -> int64_t { return peak_bytes; });
  library.def("host_memory(Tensor tensor) -> Tensor", [](const Tensor& tensor) { return on_cpu(tensor); });
  library.def("default_generator() -> Generator?", []() { return default_generator(); });
}
