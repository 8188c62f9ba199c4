// A torch device "npu" whose memory comes from aclrtMallocAlign32, looked up as torch_npu does when LD_PRELOAD is set
// (RTLD_DEFAULT). Operators run on the CPU. Its caching allocator keeps freed blocks until the cache is emptied, and
// private pools keep theirs for good.
#include <ATen/EmptyTensor.h>
#include <ATen/detail/PrivateUse1HooksInterface.h>
#include <ATen/native/CPUFallback.h>
#include <ATen/ops/_local_scalar_dense.h>
#include <ATen/ops/_reshape_alias_native.h>
#include <ATen/ops/as_strided_native.h>
#include <ATen/ops/from_blob.h>
#include <ATen/ops/set_native.h>
#include <ATen/ops/view_native.h>
#include <c10/core/Allocator.h>
#include <c10/core/CPUAllocator.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>
#include <dlfcn.h>
#include <torch/library.h>

#include <map>
#include <algorithm>
#include <mutex>
#include <thread>
#include <unordered_map>
#include <vector>

namespace {
using Size = size_t;
struct Block {
  Size size;
  int64_t pool;
};
struct PoolFunctions {
  void *(*allocate)(ssize_t, int, void *);
};

std::mutex lock;
std::unordered_map<void *, Block> live;
std::multimap<std::pair<int64_t, Size>, void *> cached;
std::map<int64_t, PoolFunctions> functions;
std::vector<std::pair<std::thread::id, int64_t>> active;
Size reserved = 0, limit = ~Size(0);
const c10::Device NPU(c10::DeviceType::PrivateUse1, 0);

// With STUB_INERT, as an older torch_npu: from the library itself, past LD_PRELOAD.
void *look_up(const char *name) {
  return dlsym(getenv("STUB_INERT") ? dlopen("libstub.so", RTLD_LAZY | RTLD_NOLOAD) : RTLD_DEFAULT, name);
}

void *from_runtime(Size size) {
  auto call = reinterpret_cast<int (*)(void **, Size, int)>(look_up("aclrtMallocAlign32"));
  TORCH_CHECK(call, "aclrtMallocAlign32 is not found");
  void *out = nullptr;
  TORCH_CHECK(call(&out, size, 0) == 0, "NPU out of memory. Tried to allocate ", size, " bytes");
  return out;
}

void give_back(void *pointer) {
  std::lock_guard<std::mutex> guard(lock);
  auto found = live.find(pointer);
  cached.emplace(std::make_pair(found->second.pool, found->second.size), pointer);
  live.erase(found);
}

// As in torch_npu, the pool that was begun first wins.
int64_t pool_of_this_thread() {
  for (auto &[thread, pool] : active)
    if (thread == std::this_thread::get_id()) return pool;
  return 0;
}

// Pools keep theirs.
void give_cached_back() {
  auto call = reinterpret_cast<int (*)(void *)>(look_up("aclrtFree"));
  for (auto entry = cached.begin(); entry != cached.end();) {
    if (entry->first.first) {
      ++entry;
      continue;
    }
    TORCH_CHECK(call && call(entry->second) == 0, "aclrtFree failed");
    reserved -= entry->first.second;
    entry = cached.erase(entry);
  }
}

struct Caching final : c10::Allocator {
  c10::DataPtr allocate(Size wanted) override {
    if (!wanted) return {nullptr, NPU};
    std::lock_guard<std::mutex> guard(lock);
    int64_t pool = pool_of_this_thread();
    Size size = (wanted + 4095) / 4096 * 4096;
    void *pointer;
    auto found = cached.lower_bound({pool, size});
    if (found != cached.end() && found->first.first == pool) {
      pointer = found->second;
      size = found->first.second;
      cached.erase(found);
    } else {
      if (reserved + size > limit) give_cached_back();
      TORCH_CHECK_WITH(OutOfMemoryError, reserved + size <= limit, "NPU out of memory. Tried to allocate ", size,
                       " bytes beside ", reserved, " with a limit of ", limit);
      auto own = functions.find(pool);
      pointer = own == functions.end() ? from_runtime(size) : own->second.allocate(size, 0, nullptr);
      reserved += size;
    }
    live[pointer] = {size, pool};
    return {pointer, pointer, give_back, NPU};
  }
  c10::DeleterFnPtr raw_deleter() const override { return give_back; }
  void copy_data(void *to, const void *from, Size size) const override { std::memcpy(to, from, size); }
} allocator;

struct Hooks final : at::PrivateUse1HooksInterface {
  bool isBuilt() const override { return true; }
  bool isAvailable() const override { return true; }
  bool hasPrimaryContext(c10::DeviceIndex) const override { return true; }
  c10::DeviceIndex deviceCount() const override { return 1; }
  c10::DeviceIndex getCurrentDevice() const override { return 0; }
  void setCurrentDevice(c10::DeviceIndex) const override {}
  at::Device getDeviceFromPtr(void *) const override { return NPU; }
  c10::Allocator *getPinnedMemoryAllocator() const override { return c10::GetCPUAllocator(); }
} hooks;

at::Tensor on_host(const at::Tensor &t) {
  return t.device().is_cpu() ? t
                             : at::from_blob(t.data_ptr(), t.sizes(), t.strides(), t.options().device(at::kCPU));
}

at::Tensor empty(c10::IntArrayRef size, std::optional<at::ScalarType> dtype, std::optional<at::Layout>,
                 std::optional<at::Device>, std::optional<bool>, std::optional<at::MemoryFormat> format) {
  return at::detail::empty_generic(size, &allocator, c10::DispatchKeySet(c10::DispatchKey::PrivateUse1),
                                   c10::dtype_or_default(dtype), format);
}

at::Tensor empty_strided(c10::IntArrayRef size, c10::IntArrayRef stride, std::optional<at::ScalarType> dtype,
                         std::optional<at::Layout>, std::optional<at::Device>, std::optional<bool>) {
  return at::detail::empty_strided_generic(size, stride, &allocator,
                                           c10::DispatchKeySet(c10::DispatchKey::PrivateUse1),
                                           c10::dtype_or_default(dtype));
}

at::Tensor copy_from(const at::Tensor &self, const at::Tensor &target, bool) {
  on_host(target).copy_(on_host(self));
  return target;
}

const at::Tensor &resize(const at::Tensor &self, c10::IntArrayRef size, std::optional<at::MemoryFormat>) {
  auto *tensor = self.unsafeGetTensorImpl();
  Size wanted = c10::multiply_integers(size) * self.itemsize() + self.storage_offset() * self.itemsize();
  if (wanted > self.storage().nbytes()) {
    auto fresh = allocator.allocate(wanted);
    if (self.storage().nbytes()) std::memcpy(fresh.get(), self.storage().data(), self.storage().nbytes());
    tensor->unsafe_storage().set_data_ptr_noswap(std::move(fresh));
    tensor->unsafe_storage().set_nbytes(wanted);
  }
  tensor->set_sizes_contiguous(size);
  return self;
}

at::Tensor copy_from_and_resize(const at::Tensor &self, const at::Tensor &target) {
  resize(target, self.sizes(), std::nullopt);
  return copy_from(self, target, false);
}

at::Scalar item(const at::Tensor &self) { return at::_local_scalar_dense(on_host(self)); }

void fallback(const c10::OperatorHandle &op, torch::jit::Stack *stack) { at::native::cpu_fallback(op, stack); }

at::Tensor from_address(int64_t address, int64_t nbytes) {
  c10::DataPtr data(reinterpret_cast<void *>(address), NPU);
  c10::Storage storage(c10::Storage::use_byte_size_t(), nbytes, std::move(data), nullptr, false);
  return empty({0}, at::kByte, {}, {}, {}, {}).set_(storage, 0, {nbytes}, {1});
}
}  // namespace

C10_REGISTER_GUARD_IMPL(PrivateUse1, c10::impl::NoOpDeviceGuardImpl<c10::DeviceType::PrivateUse1>);

TORCH_LIBRARY_IMPL(_, PrivateUse1, m) { m.fallback(torch::CppFunction::makeFromBoxedFunction<&fallback>()); }

TORCH_LIBRARY_IMPL(aten, PrivateUse1, m) {
  m.impl("empty.memory_format", empty);
  m.impl("empty_strided", empty_strided);
  m.impl("resize_", resize);
  m.impl("_copy_from", copy_from);
  m.impl("_copy_from_and_resize", copy_from_and_resize);
  m.impl("_local_scalar_dense", item);
  m.impl("view", at::native::view);
  m.impl("as_strided", at::native::as_strided_tensorimpl);
  m.impl("_reshape_alias", at::native::_reshape_alias);
  m.impl("set_.source_Storage_storage_offset", at::native::set_storage_cpu_);
  m.impl("set_.source_Storage",
         static_cast<at::Tensor &(*)(at::Tensor &, at::Storage)>(at::native::set_));
}

TORCH_LIBRARY(rljob_stub, m) { m.def("from_address(int address, int nbytes) -> Tensor", from_address); }

extern "C" {
void stub_register() { at::RegisterPrivateUse1HooksInterface(&hooks); }
void stub_pool_begin(int64_t pool) {
  std::lock_guard<std::mutex> guard(lock);
  active.emplace_back(std::this_thread::get_id(), pool);
}
void stub_pool_end(int64_t pool) {
  std::lock_guard<std::mutex> guard(lock);
  active.erase(std::find(active.begin(), active.end(), std::make_pair(std::this_thread::get_id(), pool)));
}
void stub_limit(Size bytes) { limit = bytes; }
void stub_pool_allocator(int64_t pool, void *allocate) {
  functions[pool] = {reinterpret_cast<void *(*)(ssize_t, int, void *)>(allocate)};
}
Size stub_reserved() { return reserved; }
void stub_empty_cache() {
  std::lock_guard<std::mutex> guard(lock);
  give_cached_back();
}
}
