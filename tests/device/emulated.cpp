// A CUDA device without one. Its memory is the host's, and every operator of the dispatch key CUDA runs the CPU's kernel on the
// same bytes. Code on it is unmodified: tensors say cuda:0, NumPy does not read them, operands on two devices raise, and
// gradients flow on the device's own thread. It counts what a real device would be asked for.
//
// What it cannot show: speed, asynchrony, how a GPU rounds, what cuDNN and cuBLAS choose.
#include <ATen/Context.h>
#include <ATen/EmptyTensor.h>
#include <ATen/core/Tensor.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/core/enum_tag.h>
#include <ATen/detail/CUDAHooksInterface.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>
#include <torch/library.h>

#include <atomic>
#include <cstring>
#include <memory>
#include <string>
#include <unordered_map>
#include <unordered_set>
#include <vector>

namespace {

using at::Tensor;
using c10::Device;
using c10::DeviceType;
using c10::DispatchKey;
using c10::IValue;
using c10::OperatorHandle;

const Device here(DeviceType::CUDA, 0);

// What it was asked for. An upload or a download is a copy from or to the host's memory. Downloads and operators whose shape or
// value the host must know make it wait (`syncs`); views cost nothing; all else is a launch.
std::atomic<int64_t> launches, uploads, downloads, syncs;
std::atomic<int64_t> used, most, room;  // bytes in use, of which there have been so many at most, and how many there are
std::atomic<int64_t> until_broken = -1;  // launches until it breaks; < 0: it does not

// --- The device as PyTorch's core sees it. Work is done when the call returns, so streams and events are nothing.

struct Guard final : c10::impl::DeviceGuardImplInterface {
  DeviceType type() const override { return DeviceType::CUDA; }
  Device exchangeDevice(Device) const override { return here; }
  Device getDevice() const override { return here; }
  void setDevice(Device) const override {}
  void uncheckedSetDevice(Device) const noexcept override {}
  c10::DeviceIndex deviceCount() const noexcept override { return 1; }
  c10::Stream getStream(Device) const override { return c10::Stream(c10::Stream::DEFAULT, here); }
  c10::Stream getDefaultStream(Device d) const override { return getStream(d); }
  c10::Stream getStreamFromGlobalPool(Device d, bool) const override { return getStream(d); }
  c10::Stream getNewStream(Device d, int) const override { return getStream(d); }
  c10::Stream exchangeStream(c10::Stream) const override { return getStream(here); }
  bool queryStream(const c10::Stream&) const override { return true; }
  void synchronizeStream(const c10::Stream&) const override {}
  void synchronizeDevice(const c10::DeviceIndex) const override {}
  void record(void**, const c10::Stream&, const c10::DeviceIndex, const c10::EventFlag) const override {}
  void block(void*, const c10::Stream&) const override {}
  bool queryEvent(void*) const override { return true; }
  void synchronizeEvent(void*) const override {}
  void destroyEvent(void*, const c10::DeviceIndex) const noexcept override {}
  void recordDataPtrOnStream(const c10::DataPtr&, const c10::Stream&) const override {}
};

struct Hooks final : at::CUDAHooksInterface {
  void init() const override {}
  bool hasCUDA() const override { return true; }
  bool isBuilt() const override { return true; }
  bool isAvailable() const override { return true; }
  bool hasPrimaryContext(c10::DeviceIndex) const override { return true; }
  int getNumGPUs() const override { return 1; }
  c10::DeviceIndex deviceCount() const override { return 1; }
  c10::DeviceIndex getCurrentDevice() const override { return 0; }
  c10::DeviceIndex current_device() const override { return 0; }
  void setCurrentDevice(c10::DeviceIndex) const override {}
  c10::DeviceIndex exchangeDevice(c10::DeviceIndex) const override { return 0; }
  c10::DeviceIndex maybeExchangeDevice(c10::DeviceIndex) const override { return 0; }
  bool isPinnedPtr(const void*) const override { return false; }
  long versionCuDNN() const override { return 0; }
  long versionRuntimeCuDNN() const override { return 0; }
  long versionCuDNNFrontend() const override { return 0; }
};

void reserve(int64_t bytes) {
  if (used + bytes > room)
    throw c10::OutOfMemoryError({__func__, __FILE__, __LINE__}, "CUDA out of memory: the emulated device is full");
  used += bytes;
  if (used > most) most = used.load();
}

// Bytes that a storage of ours holds, given back when it goes.
struct Held {
  int64_t bytes;
  c10::Storage owner;  // of the host's allocation
  static void drop(void* held) {
    used -= static_cast<Held*>(held)->bytes;
    delete static_cast<Held*>(held);
  }
};

c10::DataPtr adopted(c10::Storage host) {
  const auto bytes = static_cast<int64_t>(host.nbytes());
  reserve(bytes);
  void* data = host.mutable_data();
  return {data, new Held{bytes, std::move(host)}, &Held::drop, here};
}

struct Memory final : c10::Allocator {
  c10::DataPtr allocate(size_t bytes) override {
    auto* cpu = c10::GetAllocator(DeviceType::CPU);
    return adopted(c10::Storage(c10::Storage::use_byte_size_t(), bytes, cpu->allocate(bytes), cpu, false));
  }
  void copy_data(void* to, const void* from, std::size_t bytes) const override { memcpy(to, from, bytes); }
};

Guard guard;
Hooks hooks;
Memory memory;
at::Generator* stream = nullptr;  // the device's random numbers

// --- One call: tensors are lent to the CPU's kernel, and what it returns is taken back.

Tensor tensor_over(c10::Storage storage, DispatchKey key, const Tensor& like) {
  auto tensor = at::detail::make_tensor<c10::TensorImpl>(std::move(storage), c10::DispatchKeySet(key), like.dtype());
  tensor.unsafeGetTensorImpl()->set_sizes_and_strides(like.sizes(), like.strides(), like.storage_offset());
  if (like.is_conj()) tensor._set_conj(true);
  if (like.is_neg()) tensor._set_neg(true);
  return tensor;
}

class Loan {
 public:
  // A CPU tensor over the memory of one of ours.
  Tensor lend(const Tensor& ours) {
    for (auto& [mine, lent] : tensors_)
      if (mine.is_same(ours)) return lent;
    const c10::Storage& storage = ours.storage();
    auto* key = storage.unsafeGetStorageImpl();
    auto found = storages_.find(key);
    if (found == storages_.end()) {
      c10::DataPtr data(storage.mutable_data(), new c10::Storage(storage),
                        [](void* s) { delete static_cast<c10::Storage*>(s); }, Device(DeviceType::CPU));
      c10::Storage lent(c10::Storage::use_byte_size_t(), storage.nbytes(), std::move(data),
                        c10::GetAllocator(DeviceType::CPU), true);
      found = storages_.emplace(key, std::make_pair(storage, std::move(lent))).first;
    }
    tensors_.emplace_back(ours, tensor_over(found->second.second, DispatchKey::CPU, ours));
    return tensors_.back().second;
  }

  // After the kernel: ours are resized as the lent ones were.
  void settle() {
    for (auto& [key, pair] : storages_) {
      auto& [ours, lent] = pair;
      if (ours.data() == lent.data()) continue;
      ours.unsafeGetStorageImpl()->set_nbytes(lent.nbytes());
      ours.unsafeGetStorageImpl()->set_data_ptr_noswap(adopted(lent));
    }
    for (auto& [ours, lent] : tensors_)
      if (ours.sizes() != lent.sizes() || ours.strides() != lent.strides() || ours.storage_offset() != lent.storage_offset())
        ours.unsafeGetTensorImpl()->set_sizes_and_strides(lent.sizes(), lent.strides(), lent.storage_offset());
  }

  Tensor take_back(const Tensor& result) {
    if (!result.defined() || !result.device().is_cpu()) return result;
    for (auto& [ours, lent] : tensors_)
      if (lent.is_same(result)) return ours;
    for (auto& [key, pair] : storages_)
      if (pair.second.unsafeGetStorageImpl() == result.storage().unsafeGetStorageImpl())
        return tensor_over(pair.first, DispatchKey::CUDA, result);
    c10::Storage storage(c10::Storage::use_byte_size_t(), result.storage().nbytes(), adopted(result.storage()), &memory, true);
    return tensor_over(std::move(storage), DispatchKey::CUDA, result);
  }

  bool empty() const { return tensors_.empty(); }

 private:
  std::vector<std::pair<Tensor, Tensor>> tensors_;  // ours, lent
  std::unordered_map<c10::StorageImpl*, std::pair<c10::Storage, c10::Storage>> storages_;
};

bool is_generator(const c10::TypePtr& type) {
  auto optional = type->cast<c10::OptionalType>();
  return (optional ? optional->getElementType() : type)->kind() == c10::TypeKind::GeneratorType;
}

// One operator on the device.
struct OnHost final : c10::OperatorKernel {
  explicit OnHost(const OperatorHandle& op) : name(op.schema().name()) {
    const auto& schema = op.schema();
    copies = name == "aten::copy_";
    reads = name == "aten::_local_scalar_dense";
    for (size_t i = 0; i < schema.arguments().size(); i++) {
      if (is_generator(schema.arguments()[i].type())) generator = i;
      indexes |= i == 1 && schema.arguments()[i].name() == "indices";
    }
    waits = !indexes && (op.hasTag(at::Tag::data_dependent_output) || op.hasTag(at::Tag::dynamic_output_shape));
    // Where a 0-d tensor of the host may stand for a number.
    static const std::unordered_set<std::string> numeric = {"fill_", "masked_fill_", "masked_fill", "index_fill_", "lerp_", "lerp"};
    takes_numbers = op.hasTag(at::Tag::pointwise) || numeric.count(name.substr(6));
    free = op.hasTag(at::Tag::inplace_view) || reads;
    for (const auto& result : schema.returns()) free |= result.alias_info() && !result.alias_info()->isWrite();
  }

  void operator()(const OperatorHandle& op, c10::DispatchKeySet, torch::jit::Stack* stack) {
    const size_t n = op.schema().arguments().size(), base = stack->size() - n;
    Loan loan;
    bool made_here = false, on_host = false, masked = false;
    const bool download = copies && !(*stack)[base].toTensor().is_cuda();
    const bool upload = copies && !(*stack)[base + 1].toTensor().is_cuda();
    auto lend = [&](const Tensor& tensor) {
      if (!tensor.defined()) return tensor;
      if (tensor.is_cuda()) return loan.lend(tensor);
      on_host |= !copies && !(takes_numbers && tensor.dim() == 0);
      return tensor;
    };
    for (size_t i = 0; i < n; i++) {
      IValue& value = (*stack)[base + i];
      if (value.isTensor()) {
        value = lend(value.toTensor());
      } else if (value.isTensorList()) {
        c10::List<Tensor> list;
        for (const Tensor& tensor : value.toTensorVector()) list.push_back(lend(tensor));
        value = list;
      } else if (value.isOptionalTensorList()) {
        c10::List<std::optional<Tensor>> list;
        for (const auto& tensor : value.toOptionalTensorVector()) {
          if (!tensor || !tensor->defined()) {
            list.push_back(tensor);
            continue;
          }
          masked |= tensor->scalar_type() == at::kBool || tensor->scalar_type() == at::kByte;
          uploads += tensor->is_cpu();  // indices may come from the host, at the price of a copy
          list.push_back(tensor->is_cpu() ? *tensor : loan.lend(*tensor));
        }
        value = list;
      } else if (value.isDevice() && value.toDevice().is_cuda()) {
        value = Device(DeviceType::CPU);
        made_here = true;
      } else if (i == generator) {
        TORCH_CHECK(!value.isGenerator(), "Expected a 'cuda' device type for generator but found 'cpu' (", name, ")");
        value = *stream;
      }
    }
    TORCH_CHECK(loan.empty() || !on_host,
                "Expected all tensors to be on the same device, but found at least two devices, cuda:0 and cpu! (", name, ")");
    uploads += upload;
    downloads += download || reads;
    syncs += download || waits || masked;
    if (!free && !upload && !download) launch();
    {
      at::AutoDispatchBelowADInplaceOrView below;
      op.redispatchBoxed(c10::DispatchKeySet(DispatchKey::CPU), stack);
    }
    loan.settle();
    if (download || (loan.empty() && !made_here)) return;
    for (size_t i = stack->size() - op.schema().returns().size(); i < stack->size(); i++) {
      IValue& value = (*stack)[i];
      if (value.isTensor()) {
        value = loan.take_back(value.toTensor());
      } else if (value.isTensorList()) {
        c10::List<Tensor> list;
        for (const Tensor& tensor : value.toTensorVector()) list.push_back(loan.take_back(tensor));
        value = list;
      }
    }
  }

 private:
  std::string name;
  bool copies, reads, waits, takes_numbers, free, indexes = false;
  size_t generator = SIZE_MAX;  // its place among the arguments

  static void launch() {
    launches++;
    // As on hardware, every later call fails, too.
    if (until_broken >= 0 && launches > until_broken)
      throw c10::AcceleratorError({__func__, __FILE__, __LINE__}, 700, "CUDA error: an illegal memory access was encountered");
  }
};

Tensor empty(c10::SymIntArrayRef size, std::optional<at::ScalarType> dtype, std::optional<at::Layout>, std::optional<Device>,
             std::optional<bool>, std::optional<at::MemoryFormat> format) {
  return Tensor(at::detail::empty_generic(C10_AS_INTARRAYREF_SLOW(size), &memory, c10::DispatchKeySet(DispatchKey::CUDA),
                                          c10::dtype_or_default(dtype), format));
}

Tensor empty_strided(c10::SymIntArrayRef size, c10::SymIntArrayRef stride, std::optional<at::ScalarType> dtype,
                     std::optional<at::Layout>, std::optional<Device>, std::optional<bool>) {
  return Tensor(at::detail::empty_strided_generic(C10_AS_INTARRAYREF_SLOW(size), C10_AS_INTARRAYREF_SLOW(stride), &memory,
                                                  c10::DispatchKeySet(DispatchKey::CUDA), c10::dtype_or_default(dtype)));
}

// --- From Python, as torch.ops.emulated.*

void install(std::optional<at::Generator> generator, int64_t bytes) {
  static std::vector<c10::RegistrationHandleRAII> handles;
  if (stream) return;
  stream = new at::Generator(*generator);
  room = bytes;
  c10::impl::device_guard_impl_registry[static_cast<size_t>(DeviceType::CUDA)].store(&guard);
  c10::SetAllocator(DeviceType::CUDA, &memory, 255);
  // PyTorch has made its hooks already and offers no way to replace them. They have no data of their own: they get our methods.
  auto& theirs = const_cast<at::CUDAHooksInterface&>(at::detail::getCUDAHooks());
  *reinterpret_cast<void**>(&theirs) = *reinterpret_cast<void**>(&hooks);
  auto& dispatcher = c10::Dispatcher::singleton();
  static const std::unordered_set<std::string> composite = {"copy_", "convolution", "convolution_backward"};
  static const std::unordered_set<std::string> own = {"empty.memory_format", "empty_strided.", "record_stream."};
  for (const auto& id : dispatcher.getAllOpNames()) {
    if (id.name.rfind("aten::", 0) != 0 || own.count(id.name.substr(6) + "." + id.overload_name)) continue;
    auto op = dispatcher.findOp(id);
    if (!op || !op->hasSchema()) continue;
    if (!op->hasKernelForDispatchKey(DispatchKey::CPU) && !(composite.count(id.name.substr(6)) && id.overload_name.empty()))
      continue;
    auto kernel = c10::KernelFunction::makeFromBoxedFunctor(std::make_unique<OnHost>(*op));
    handles.push_back(dispatcher.registerImpl(id, DispatchKey::CUDA, std::move(kernel), std::nullopt, nullptr, "emulated"));
  }
  static torch::Library library(torch::Library::IMPL, "aten", DispatchKey::CUDA, __FILE__, __LINE__);
  library.impl("empty.memory_format", &empty);
  library.impl("empty_strided", &empty_strided);
}

std::vector<int64_t> counts() { return {launches, uploads, downloads, syncs}; }

std::vector<int64_t> bytes() { return {used, room, most}; }

void set_room(int64_t bytes) { room = bytes; }

void break_after(int64_t more) { until_broken = more < 0 ? -1 : launches + more; }

}  // namespace

TORCH_LIBRARY(emulated, m) {
  m.def("install(Generator? stream, int bytes) -> ()", &install);
  m.def("counts() -> int[]", &counts);
  m.def("bytes() -> int[]", &bytes);
  m.def("set_room(int bytes) -> ()", &set_room);
  m.def("break_after(int more) -> ()", &break_after);
}
