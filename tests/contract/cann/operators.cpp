// What is computed on the stand-in: torch's own CPU operators over the device's memory, which the host can reach.
//
// torch_npu's operators call kernels of libopapi, of which there are two here: copy and cast. The others are replaced, name
// by name, by torch's fallback to the CPU; what makes, views and copies tensors stays torch_npu's own.
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/native/CPUFallback.h>
#include <ATen/ops/from_blob.h>
#include <acl/acl.h>
#include <torch/library.h>

#include <string>
#include <unordered_set>

#define private public
#include <c10/core/AllocatorConfig.h>
#undef private

namespace {
using Names = std::unordered_set<std::string>;

// torch_npu is built for torch without CUDA. The package index has none for x86-64, and the settings' names that CUDA's
// allocator has registered would be registered again.
__attribute__((constructor)) void forget_settings_of_cuda() {
  const Names of_torch = {"large_segment_size_mb",        "max_split_size_mb",        "max_non_split_rounding_mb",
                          "garbage_collection_threshold", "roundup_power2_divisions", "expandable_segments",
                          "pinned_use_background_threads"};
  auto &keys = c10::CachingAllocator::AcceleratorAllocatorConfig::getMutableKeys();
  for (auto key = keys.begin(); key != keys.end();) key = of_torch.count(*key) ? std::next(key) : keys.erase(key);
}

const Names KEPT = {"aten::empty.memory_format",
                    "aten::empty_strided",
                    "aten::empty_like",
                    "aten::new_empty_strided",
                    "aten::resize_",
                    "aten::copy_",
                    "aten::_copy_from",
                    "aten::_copy_from_and_resize",
                    "aten::_to_copy",
                    "aten::_local_scalar_dense",
                    "aten::record_stream",
                    "aten::is_pinned",
                    "aten::_pin_memory",
                    "aten::clone",
                    "aten::contiguous",
                    "aten::set_",
                    "aten::set_.source_Storage",
                    "aten::set_.source_Storage_storage_offset",
                    "aten::set_.source_Tensor",
                    "aten::is_set_to",
                    "aten::_has_compatible_shallow_copy_type",
                    "aten::matmul_backward"};

bool is_view(const c10::FunctionSchema &schema) {
  for (auto &result : schema.returns())
    if (result.alias_info() && !result.alias_info()->isWrite()) return true;
  return false;
}

void on_cpu(const c10::OperatorHandle &op, torch::jit::Stack *stack) { at::native::cpu_fallback(op, stack); }

struct Replaced {
  torch::Library library{torch::Library::IMPL, "aten", c10::DispatchKey::PrivateUse1, __FILE__, __LINE__};

  Replaced() {
    auto &dispatcher = c10::Dispatcher::singleton();
    for (auto &name : dispatcher.getRegistrationsForDispatchKey(c10::DispatchKey::PrivateUse1)) {
      std::string full = name.overload_name.empty() ? name.name : name.name + "." + name.overload_name;
      auto schema = dispatcher.findSchema(name);
      if (full.rfind("aten::", 0) == 0 && !KEPT.count(full) && !(schema && is_view(schema->schema())))
        library.impl(full.c_str(), torch::CppFunction::makeFromBoxedFunction<&on_cpu>());
    }
  }
};

at::ScalarType torch_dtype(aclDataType type) {
  switch (type) {
    case ACL_FLOAT: return at::kFloat;
    case ACL_FLOAT16: return at::kHalf;
    case ACL_BF16: return at::kBFloat16;
    case ACL_DOUBLE: return at::kDouble;
    case ACL_INT8: return at::kChar;
    case ACL_UINT8: return at::kByte;
    case ACL_INT16: return at::kShort;
    case ACL_INT32: return at::kInt;
    case ACL_INT64: return at::kLong;
    case ACL_BOOL: return at::kBool;
    default: fprintf(stderr, "stand-in for CANN: data type %d is not known\n", type); abort();
  }
}
}  // namespace

struct aclTensor {
  at::Tensor tensor;
};
struct aclOpExecutor {
  at::Tensor to, from;
};

extern "C" {
void compute_on_host() { static Replaced replaced; }

aclTensor *aclCreateTensor(const int64_t *sizes, uint64_t dimensions, aclDataType type, const int64_t *strides,
                           int64_t offset, aclFormat, const int64_t *, uint64_t, void *data) {
  auto dtype = torch_dtype(type);
  c10::InferenceMode none(false);  // another thread copies into it, which is not in that mode
  char *start = static_cast<char *>(data) + offset * c10::elementSize(dtype);
  return new aclTensor{at::from_blob(start, {sizes, dimensions}, {strides, dimensions}, dtype)};
}

int aclDestroyTensor(const aclTensor *tensor) {
  delete tensor;
  return 0;
}

int aclnnInplaceCopyGetWorkspaceSize(aclTensor *to, const aclTensor *from, uint64_t *size, aclOpExecutor **out) {
  *size = 0;
  *out = new aclOpExecutor{to->tensor, from->tensor};
  return 0;
}

int aclnnInplaceCopy(void *, uint64_t, aclOpExecutor *executor, aclrtStream) {
  int result = 0;
  try {
    executor->to.copy_(executor->from);
  } catch (const std::exception &error) {
    fprintf(stderr, "stand-in for CANN: a copy: %s\n", error.what());
    result = 1;
  }
  delete executor;
  return result;
}

int aclnnCastGetWorkspaceSize(const aclTensor *from, aclDataType, aclTensor *to, uint64_t *size, aclOpExecutor **out) {
  return aclnnInplaceCopyGetWorkspaceSize(to, from, size, out);
}

int aclnnCast(void *workspace, uint64_t size, aclOpExecutor *executor, aclrtStream stream) {
  return aclnnInplaceCopy(workspace, size, executor, stream);
}
}
