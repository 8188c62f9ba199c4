// HCCL's collectives between processes of one machine: each rank puts what it sends into a file that all of them map,
// and takes from it what it gets.
//
// The file is made by who asks for the root's information. A rank waits for the others at most RANKS_SECONDS and then
// says HCCL_E_TIMEOUT, as HCCL does.
#include <ATen/ATen.h>
#include <ATen/core/grad_mode.h>
#include <acl/acl.h>
#include <fcntl.h>
#include <hccl/hccl.h>
#include <sys/mman.h>
#include <unistd.h>

#include <atomic>
#include <chrono>
#include <cstdio>
#include <cstring>
#include <functional>
#include <thread>

namespace {
constexpr uint64_t PART = 1 << 20;
constexpr uint32_t MOST_RANKS = 64;
constexpr auto RANKS_SECONDS = std::chrono::seconds(60);

struct Shared {
  std::atomic<uint32_t> joined, arrived, turn;
  uint64_t bytes[MOST_RANKS];
  char parts[][PART];
};

struct Communicator {
  std::string name;
  Shared *shared;
  uint32_t ranks, rank;

  HcclResult wait(const std::function<bool()> &done) const {
    auto deadline = std::chrono::steady_clock::now() + RANKS_SECONDS;
    for (int spins = 0; !done(); spins++) {
      if (spins > 1000) std::this_thread::sleep_for(std::chrono::microseconds(50));
      if (std::chrono::steady_clock::now() > deadline) return HCCL_E_TIMEOUT;
    }
    return HCCL_SUCCESS;
  }

  HcclResult meet() const {
    auto turn = shared->turn.load();
    if (shared->arrived.fetch_add(1) + 1 == ranks) {
      shared->arrived = 0;
      shared->turn++;
      return HCCL_SUCCESS;
    }
    return wait([&] { return shared->turn != turn; });
  }

  // Each rank shows `bytes` of its own, part by part; `take(rank, offset, part, bytes)` is called for each rank's.
  HcclResult exchange(const void *own, uint64_t bytes,
                      const std::function<void(uint32_t, uint64_t, const char *, uint64_t)> &take) const {
    for (uint64_t offset = 0, longest = 1; offset < longest; offset += PART) {
      shared->bytes[rank] = bytes;
      if (offset < bytes)
        memcpy(shared->parts[rank], static_cast<const char *>(own) + offset, std::min(PART, bytes - offset));
      if (auto error = meet()) return error;
      for (uint32_t from = 0; from < ranks; from++) {
        auto length = shared->bytes[from];
        longest = std::max(longest, length);
        if (offset < length) take(from, offset, shared->parts[from], std::min(PART, length - offset));
      }
      if (auto error = meet()) return error;
    }
    return HCCL_SUCCESS;
  }
};

at::ScalarType dtype(HcclDataType type) {
  switch (type) {
    case HCCL_DATA_TYPE_INT8: return at::kChar;
    case HCCL_DATA_TYPE_UINT8: return at::kByte;
    case HCCL_DATA_TYPE_INT16: return at::kShort;
    case HCCL_DATA_TYPE_INT32: return at::kInt;
    case HCCL_DATA_TYPE_INT64: return at::kLong;
    case HCCL_DATA_TYPE_FP16: return at::kHalf;
    case HCCL_DATA_TYPE_BFP16: return at::kBFloat16;
    case HCCL_DATA_TYPE_FP32: return at::kFloat;
    default: fprintf(stderr, "stand-in for HCCL: data type %d is not known\n", type); abort();
  }
}

uint64_t size(HcclDataType type) { return c10::elementSize(dtype(type)); }

void reduce(void *into, const void *from, uint64_t bytes, HcclDataType type, HcclReduceOp op) {
  c10::InferenceMode none(false);
  at::NoGradGuard no_gradients;
  int64_t count = bytes / size(type);
  auto a = at::from_blob(into, {count}, dtype(type)), b = at::from_blob(const_cast<void *>(from), {count}, dtype(type));
  switch (op) {
    case HCCL_REDUCE_SUM: a.add_(b); break;
    case HCCL_REDUCE_PROD: a.mul_(b); break;
    case HCCL_REDUCE_MAX: a.copy_(at::maximum(a, b)); break;
    case HCCL_REDUCE_MIN: a.copy_(at::minimum(a, b)); break;
    default: abort();
  }
}

Communicator &of(HcclComm comm) { return *static_cast<Communicator *>(comm); }

// What a rank gets of the reduction of everybody's `bytes` beginning at `own`, of which it wants all or none.
HcclResult reduced(Communicator &c, const void *own, char *into, uint64_t bytes, HcclDataType type, HcclReduceOp op) {
  return c.exchange(own, bytes, [&](uint32_t from, uint64_t offset, const char *part, uint64_t length) {
    if (!into) return;
    if (from == 0)
      memcpy(into + offset, part, length);
    else
      reduce(into + offset, part, length, type, op);
  });
}

uint64_t shared_bytes(uint32_t ranks) { return sizeof(Shared) + ranks * PART; }
}  // namespace

extern "C" {
HcclResult HcclSetConfig(HcclConfig, HcclConfigValue) { return HCCL_SUCCESS; }
uint32_t HcclGetCommConfigCapability() { return 0; }
const char *HcclGetErrorString(HcclResult code) { return code == HCCL_E_TIMEOUT ? "a rank did not come" : "an error"; }
HcclResult HcclGetCommAsyncError(HcclComm, HcclResult *error) {
  *error = HCCL_SUCCESS;
  return HCCL_SUCCESS;
}

HcclResult HcclGetRootInfo(HcclRootInfo *info) {
  static std::atomic<int> made;
  snprintf(info->internal, sizeof info->internal, "/dev/shm/hccl-%d-%d", getpid(), made++);
  int file = open(info->internal, O_RDWR | O_CREAT | O_EXCL, 0600);
  if (file < 0 || ftruncate(file, shared_bytes(MOST_RANKS))) return HCCL_E_SYSCALL;
  close(file);
  return HCCL_SUCCESS;
}

HcclResult HcclCommInitRootInfo(uint32_t ranks, const HcclRootInfo *info, uint32_t rank, HcclComm *comm) {
  int file = open(info->internal, O_RDWR);
  if (file < 0 || ranks > MOST_RANKS) return HCCL_E_PARA;
  auto *shared = mmap(0, shared_bytes(ranks), PROT_READ | PROT_WRITE, MAP_SHARED, file, 0);
  close(file);
  if (shared == MAP_FAILED) return HCCL_E_MEMORY;
  auto *made = new Communicator{info->internal, static_cast<Shared *>(shared), ranks, rank};
  made->shared->joined++;
  auto error = made->wait([&] { return made->shared->joined >= ranks; });
  // Nobody needs the name any more.
  unlink(info->internal);
  *comm = made;
  return error;
}
HcclResult HcclCommInitRootInfoConfig(uint32_t ranks, const HcclRootInfo *info, uint32_t rank, const HcclCommConfig *,
                                      HcclComm *comm) {
  return HcclCommInitRootInfo(ranks, info, rank, comm);
}
HcclResult HcclCommDestroy(HcclComm comm) {
  munmap(of(comm).shared, shared_bytes(of(comm).ranks));
  delete &of(comm);
  return HCCL_SUCCESS;
}
HcclResult HcclGetCommName(HcclComm comm, char *name) {
  snprintf(name, COMM_NAME_MAX_LENGTH, "%s", of(comm).name.c_str());
  return HCCL_SUCCESS;
}
HcclResult HcclGetRankSize(HcclComm comm, uint32_t *ranks) {
  *ranks = of(comm).ranks;
  return HCCL_SUCCESS;
}
HcclResult HcclGetRankId(HcclComm comm, uint32_t *rank) {
  *rank = of(comm).rank;
  return HCCL_SUCCESS;
}

HcclResult HcclBarrier(HcclComm comm, aclrtStream) { return of(comm).meet(); }

HcclResult HcclAllReduce(void *own, void *into, uint64_t count, HcclDataType type, HcclReduceOp op, HcclComm comm,
                         aclrtStream) {
  return reduced(of(comm), own, static_cast<char *>(into), count * size(type), type, op);
}

HcclResult HcclReduce(void *own, void *into, uint64_t count, HcclDataType type, HcclReduceOp op, uint32_t root,
                      HcclComm comm, aclrtStream) {
  auto *wanted = of(comm).rank == root ? static_cast<char *>(into) : nullptr;
  return reduced(of(comm), own, wanted, count * size(type), type, op);
}

HcclResult HcclReduceScatter(void *own, void *into, uint64_t count, HcclDataType type, HcclReduceOp op, HcclComm comm,
                             aclrtStream) {
  auto bytes = count * size(type);
  for (uint32_t to = 0; to < of(comm).ranks; to++) {
    auto *wanted = of(comm).rank == to ? static_cast<char *>(into) : nullptr;
    if (auto error = reduced(of(comm), static_cast<char *>(own) + to * bytes, wanted, bytes, type, op)) return error;
  }
  return HCCL_SUCCESS;
}

HcclResult HcclAllGather(void *own, void *into, uint64_t count, HcclDataType type, HcclComm comm, aclrtStream) {
  auto bytes = count * size(type);
  return of(comm).exchange(own, bytes, [&](uint32_t from, uint64_t offset, const char *part, uint64_t length) {
    memcpy(static_cast<char *>(into) + from * bytes + offset, part, length);
  });
}

HcclResult HcclBroadcast(void *data, uint64_t count, HcclDataType type, uint32_t root, HcclComm comm, aclrtStream) {
  auto bytes = of(comm).rank == root ? count * size(type) : 0;
  return of(comm).exchange(data, bytes, [&](uint32_t from, uint64_t offset, const char *part, uint64_t length) {
    if (from != of(comm).rank) memcpy(static_cast<char *>(data) + offset, part, length);
  });
}

HcclResult HcclAlltoAllV(const void *own, const void *counts, const void *places, HcclDataType type, const void *into,
                         const void *, const void *into_places, HcclDataType, HcclComm comm, aclrtStream) {
  auto *sent = static_cast<const uint64_t *>(counts), *at_own = static_cast<const uint64_t *>(places);
  auto *at_into = static_cast<const uint64_t *>(into_places);
  auto &c = of(comm);
  for (uint32_t to = 0; to < c.ranks; to++) {
    auto *begin = static_cast<const char *>(own) + at_own[to] * size(type);
    auto error = c.exchange(begin, sent[to] * size(type), [&](uint32_t from, uint64_t offset, const char *part, uint64_t length) {
      if (c.rank == to)
        memcpy(static_cast<char *>(const_cast<void *>(into)) + at_into[from] * size(type) + offset, part, length);
    });
    if (error) return error;
  }
  return HCCL_SUCCESS;
}

HcclResult HcclAlltoAll(const void *own, uint64_t count, HcclDataType type, const void *into, uint64_t into_count,
                        HcclDataType into_type, HcclComm comm, aclrtStream stream) {
  auto ranks = of(comm).ranks;
  std::vector<uint64_t> counts(ranks, count), places(ranks), into_counts(ranks, into_count), into_places(ranks);
  for (uint32_t rank = 0; rank < ranks; rank++) {
    places[rank] = rank * count;
    into_places[rank] = rank * into_count;
  }
  return HcclAlltoAllV(own, counts.data(), places.data(), type, into, into_counts.data(), into_places.data(), into_type,
                       comm, stream);
}
}
