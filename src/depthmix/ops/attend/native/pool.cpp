// Large blocks of memory that are reused.
//
// The C library returns a large block to the system when it is freed, and the system maps it again page by page, filled
// with zeros: for the gradients of a read that costs more than the arithmetic. Here a freed block is kept for the next
// request of its size. It is marked with MADV_FREE, so a system that runs short of memory may reclaim it; and the used
// and idle blocks together never exceed the peak use.
//
// A block is passed to Python as a DLPack tensor, whose deleter returns it to the pool.

#include <cstdint>

#ifdef __linux__

#include <algorithm>
#include <deque>
#include <mutex>
#include <pthread.h>
#include <sys/mman.h>

namespace {

// The unversioned structures of DLPack's dlpack.h.
struct DLTensor {
    void *data;
    struct { int32_t type, id; } device;
    int32_t ndim;
    struct { uint8_t code, bits; uint16_t lanes; } dtype;
    int64_t *shape, *strides;
    uint64_t byte_offset;
};

struct DLManagedTensor {
    DLTensor tensor;
    void *context;
    void (*deleter)(DLManagedTensor *);
};

constexpr int32_t CPU = 1;
constexpr uint8_t FLOAT = 2;
constexpr int AXES = 8;
constexpr int64_t PAGE = 1 << 21, SMALL_PAGE = 1 << 12;  // a huge page, to which blocks are aligned, and an ordinary one

struct Block {
    DLManagedTensor handle;
    int64_t shape[AXES], strides[AXES];
    void *mapping;  // one huge page longer than the block, so that the block can be aligned
    int64_t bytes;
};

class Pool {
  public:
    Block *take(int64_t bytes) {
        std::lock_guard<std::mutex> guard(lock);
        for (auto block = idle.rbegin(); block != idle.rend(); ++block)  // the one freed last is still in the caches
            if ((*block)->bytes == bytes) {
                Block *found = *block;
                idle.erase(std::next(block).base());
                waiting -= bytes, used += bytes;
                return found;
            }
        most = std::max(most, used + bytes);
        while (!idle.empty() && used + waiting + bytes > most) drop_oldest();
        Block *fresh = map(bytes);
        if (fresh) used += bytes;
        return fresh;
    }

    void give(Block *block) {
        std::lock_guard<std::mutex> guard(lock);
        madvise(block->handle.tensor.data, block->bytes, MADV_FREE);
        idle.push_back(block);
        used -= block->bytes, waiting += block->bytes;
    }

    void release() {
        std::lock_guard<std::mutex> guard(lock);
        while (!idle.empty()) drop_oldest();
        most = used;
    }

    void sizes(int64_t *in_use, int64_t *idle_bytes) {
        std::lock_guard<std::mutex> guard(lock);
        *in_use = used, *idle_bytes = waiting;
    }

    std::mutex lock;

  private:
    static Block *map(int64_t bytes) {
        void *found = mmap(nullptr, bytes + PAGE, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
        if (found == MAP_FAILED) return nullptr;
        Block *block = new Block;
        block->mapping = found, block->bytes = bytes;
        block->handle.tensor.data = (void *)(((uintptr_t)found + PAGE - 1) & ~(uintptr_t)(PAGE - 1));
        madvise(block->handle.tensor.data, bytes, MADV_HUGEPAGE);
        return block;
    }

    void drop_oldest() {
        Block *block = idle.front();
        idle.pop_front();
        waiting -= block->bytes;
        munmap(block->mapping, block->bytes + PAGE);
        delete block;
    }

    std::deque<Block *> idle;  // in the order in which they were freed
    int64_t used = 0, waiting = 0, most = 0;
};

// Never destroyed: tensors may be freed while the process exits. A fork must not copy a locked mutex.
Pool &pool() {
    static Pool *only = [] {
        Pool *made = new Pool;
        static Pool *known = made;
        pthread_atfork([] { known->lock.lock(); }, [] { known->lock.unlock(); }, [] { known->lock.unlock(); });
        return made;
    }();
    return *only;
}

}  // namespace

// An uninitialised contiguous tensor of numbers of `bits` bits; null if the system has no memory for it.
extern "C" void *pool_take(int32_t ndim, const int64_t *shape, int32_t bits) {
    int64_t count = 1;
    for (int i = 0; i < ndim; ++i) count *= shape[i];
    if (ndim > AXES) return nullptr;
    Block *block = pool().take((count * (bits / 8) + SMALL_PAGE - 1) / SMALL_PAGE * SMALL_PAGE);
    if (!block) return nullptr;
    int64_t stride = 1;
    for (int i = ndim; i-- > 0; stride *= shape[i]) block->shape[i] = shape[i], block->strides[i] = stride;
    DLTensor &tensor = block->handle.tensor;
    tensor.device = {CPU, 0}, tensor.dtype = {FLOAT, (uint8_t)bits, 1}, tensor.byte_offset = 0;
    tensor.ndim = ndim, tensor.shape = block->shape, tensor.strides = block->strides;
    block->handle.context = block;
    block->handle.deleter = [](DLManagedTensor *handle) { pool().give((Block *)handle->context); };
    return &block->handle;
}

extern "C" void pool_release() { pool().release(); }
extern "C" void pool_sizes(int64_t *used, int64_t *waiting) { pool().sizes(used, waiting); }

#else

extern "C" void *pool_take(int32_t, const int64_t *, int32_t) { return nullptr; }
extern "C" void pool_release() {}
extern "C" void pool_sizes(int64_t *used, int64_t *waiting) { *used = *waiting = 0; }

#endif
