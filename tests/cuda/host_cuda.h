// CUDA on the host, for tests: the very source of a kernel runs as plain C++, one fiber per thread of a block.
//
// A fiber runs until it comes to a barrier or a shuffle; then the next one does, in an order that the caller chooses
// (rising, falling, or drawn from a seed). So a kernel that lacks a barrier gives other results in other orders, one
// whose threads do not all come to a barrier is an error, and so is a write behind the shared memory of the launch.
// Shared memory is filled with NaN (all bits set) before each block.
//
// Blocks run one after the other, in that order too. Host threads must take turns (tests/cuda/emulated.py does).
#pragma once

#include <setjmp.h>
#include <ucontext.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <memory>
#include <random>
#include <string>
#include <type_traits>
#include <utility>
#include <vector>

#define __global__
#define __device__
#define __forceinline__ inline
#define __noinline__
#define __launch_bounds__(...)
#define SDC_UNROLL
#define SDC_SHARED(type, name) type* const name = reinterpret_cast<type*>(host_cuda::shared_bytes())

struct Dim3 {
    unsigned x = 1, y = 1, z = 1;
};

static Dim3 threadIdx, blockIdx, blockDim, gridDim;

namespace host_cuda {

constexpr std::size_t kStack = 64 << 10;
constexpr std::size_t kCanary = 64;
constexpr int kWarp = 32;

enum class Wait { None, Block, Warp, Done };

struct Fiber {
    ucontext_t start;
    jmp_buf resume;
    std::unique_ptr<char[]> stack;
    bool started = false;
    Wait wait = Wait::None;
    Dim3 index;
    int number = 0;
    unsigned long long value = 0;  // what a shuffle exchanges
};

struct State {
    std::vector<Fiber> fibers;
    Fiber* current = nullptr;
    jmp_buf scheduler;
    std::function<void()> body;
    std::unique_ptr<unsigned char[]> memory;
    std::string error;
};

inline State& state() {
    static State the;
    return the;
}

inline unsigned char* shared_bytes() {
    auto at = reinterpret_cast<std::uintptr_t>(state().memory.get());
    return reinterpret_cast<unsigned char*>((at + 15) / 16 * 16);
}

// Leave the fiber for the scheduler, and come back when that says so.
inline void pause(Wait wait) {
    State& s = state();
    Fiber* const me = s.current;
    me->wait = wait;
    if (_setjmp(me->resume) == 0) {
        _longjmp(s.scheduler, 1);
    }
}

inline void enter() {
    state().body();
    pause(Wait::Done);
}

inline void resume(Fiber& fiber) {
    State& s = state();
    s.current = &fiber;
    threadIdx = fiber.index;
    fiber.wait = Wait::None;
    if (_setjmp(s.scheduler) == 0) {
        if (fiber.started) {
            _longjmp(fiber.resume, 1);
        }
        fiber.started = true;
        getcontext(&fiber.start);
        fiber.start.uc_stack.ss_sp = fiber.stack.get();
        fiber.start.uc_stack.ss_size = kStack;
        fiber.start.uc_link = nullptr;
        makecontext(&fiber.start, enter, 0);
        setcontext(&fiber.start);
    }
}

// Orders of running: 0 rising, 1 falling, others the seed of a random one.
class Order {
  public:
    explicit Order(unsigned schedule) : schedule_(schedule), random_(schedule) {}

    std::vector<std::size_t> of(std::size_t count) {
        std::vector<std::size_t> order(count);
        for (std::size_t i = 0; i < count; ++i) {
            order[i] = schedule_ == 1 ? count - 1 - i : i;
        }
        if (schedule_ > 1) {
            std::shuffle(order.begin(), order.end(), random_);
        }
        return order;
    }

  private:
    unsigned schedule_;
    std::mt19937 random_;
};

inline void release(std::size_t first, std::size_t last) {
    for (std::size_t i = first; i < last; ++i) {
        state().fibers[i].wait = Wait::None;
    }
}

// Run fibers that can run until all are done. Returns whether they got there.
inline bool run_block(std::size_t threads, Order& order) {
    State& s = state();
    for (;;) {
        bool ran = false;
        for (const std::size_t i : order.of(threads)) {
            if (s.fibers[i].wait == Wait::None) {
                resume(s.fibers[i]);
                ran = true;
            }
        }
        const auto waits = [&](std::size_t first, std::size_t last, Wait wait) {
            return std::all_of(s.fibers.begin() + static_cast<std::ptrdiff_t>(first),
                               s.fibers.begin() + static_cast<std::ptrdiff_t>(last),
                               [wait](const Fiber& f) { return f.wait == wait; });
        };
        if (waits(0, threads, Wait::Done)) {
            return true;
        }
        bool released = false;
        for (std::size_t w = 0; w < threads; w += kWarp) {
            const std::size_t end = std::min(threads, w + kWarp);
            if (waits(w, end, Wait::Warp)) {
                release(w, end);
                released = true;
            }
        }
        if (waits(0, threads, Wait::Block)) {
            release(0, threads);
            released = true;
        }
        if (!ran && !released) {
            s.error = "not all threads come to a barrier or shuffle";
            return false;
        }
    }
}

inline void prepare(std::size_t threads) {
    State& s = state();
    while (s.fibers.size() < threads) {
        s.fibers.emplace_back();
        s.fibers.back().stack.reset(new char[kStack]);
    }
    for (std::size_t i = 0; i < threads; ++i) {
        Fiber& f = s.fibers[i];
        f.started = false;
        f.wait = Wait::None;
        f.number = static_cast<int>(i);
        const auto n = static_cast<unsigned>(i);
        f.index = {n % blockDim.x, n / blockDim.x % blockDim.y, n / blockDim.x / blockDim.y};
    }
}

// Run a grid; returns what went wrong, or nothing.
inline const char* run(const unsigned* shape, std::size_t shared, unsigned schedule, std::function<void()> body) {
    State& s = state();
    gridDim = {shape[0], shape[1], shape[2]};
    blockDim = {shape[3], shape[4], shape[5]};
    const std::size_t threads = static_cast<std::size_t>(blockDim.x) * blockDim.y * blockDim.z;
    const std::size_t blocks = static_cast<std::size_t>(gridDim.x) * gridDim.y * gridDim.z;
    s.error.clear();
    if (threads == 0 || threads > 1024 || blocks == 0 || gridDim.y > 65535 || gridDim.z > 65535) {
        return "no such launch: 1..1024 threads, 1..2^31 x 65535 x 65535 blocks";
    }
    s.body = std::move(body);
    s.memory.reset(new unsigned char[shared + 16 + kCanary]);
    Order order(schedule);
    for (const std::size_t block : order.of(blocks)) {
        const auto n = static_cast<unsigned>(block);
        blockIdx = {n % gridDim.x, n / gridDim.x % gridDim.y, n / gridDim.x / gridDim.y};
        std::memset(shared_bytes(), 0xff, shared);
        std::memset(shared_bytes() + shared, 0xa5, kCanary - 16);
        prepare(threads);
        if (!run_block(threads, order)) {
            return s.error.c_str();
        }
        for (std::size_t i = 0; i < kCanary - 16; ++i) {
            if (shared_bytes()[shared + i] != 0xa5) {
                return "a write behind the shared memory of the launch";
            }
        }
    }
    return nullptr;
}

// Types of parameters as NumPy's codes: "*f" is a pointer to float, "q" a long long.
template <typename T>
constexpr char code() {
    using U = std::remove_cv_t<T>;
    return std::is_same_v<U, float>                ? 'f'
           : std::is_same_v<U, double>             ? 'd'
           : std::is_same_v<U, short>              ? 'h'
           : std::is_same_v<U, unsigned short>     ? 'H'
           : std::is_same_v<U, int>                ? 'i'
           : std::is_same_v<U, unsigned>           ? 'I'
           : std::is_same_v<U, long long>          ? 'q'
           : std::is_same_v<U, unsigned long long> ? 'Q'
                                                   : '?';
}

template <typename... Args>
std::string signature(void (*)(Args...)) {
    std::string text;
    ((text += std::is_pointer_v<Args> ? "*" : "", text += code<std::remove_pointer_t<Args>>()), ...);
    return text;
}

template <typename... Args, std::size_t... I>
const char* call(void (*kernel)(Args...), const unsigned* shape, std::size_t shared, unsigned schedule, void** args,
                 std::index_sequence<I...>) {
    return run(shape, shared, schedule, [=] { kernel(*static_cast<Args*>(args[I])...); });
}

template <typename... Args>
const char* launch(void (*kernel)(Args...), const unsigned* shape, std::size_t shared, unsigned schedule, void** args) {
    return call(kernel, shape, shared, schedule, args, std::index_sequence_for<Args...>{});
}

}  // namespace host_cuda

inline void __syncthreads() { host_cuda::pause(host_cuda::Wait::Block); }
inline void __syncwarp(unsigned = 0xffffffffu) { host_cuda::pause(host_cuda::Wait::Warp); }

// Every lane offers its value, and takes that of another when all have.
template <typename T>
T __shfl_xor_sync(unsigned, T value, int apart) {
    static_assert(sizeof(T) <= sizeof(unsigned long long));
    host_cuda::State& s = host_cuda::state();
    host_cuda::Fiber* const me = s.current;
    me->value = 0;
    std::memcpy(&me->value, &value, sizeof(T));
    host_cuda::pause(host_cuda::Wait::Warp);
    const auto from = static_cast<std::size_t>(me->number ^ apart);
    T other;
    std::memcpy(&other, &s.fibers[from].value, sizeof(T));
    host_cuda::pause(host_cuda::Wait::Warp);  // until all have taken theirs
    return other;
}

template <typename T>
T atomicAdd(T* at, T value) {
    static_assert(std::is_integral_v<T>, "sums of floats depend on the order of atomic additions");
    const T old = *at;
    *at = old + value;
    return old;
}

inline double __dadd_rn(double a, double b) { return a + b; }
inline double __dsub_rn(double a, double b) { return a - b; }
inline double __dmul_rn(double a, double b) { return a * b; }

template <typename To, typename From>
To bits_as(From from) {
    static_assert(sizeof(To) == sizeof(From));
    To to;
    std::memcpy(&to, &from, sizeof(To));
    return to;
}

inline float __uint_as_float(unsigned v) { return bits_as<float>(v); }
inline int __float_as_int(float v) { return bits_as<int>(v); }
inline long long __double_as_longlong(double v) { return bits_as<long long>(v); }
inline double __longlong_as_double(long long v) { return bits_as<double>(v); }
using std::exp;
using std::fabs;
using std::floor;
using std::fma;
using std::log;
using std::rint;
using std::sqrt;
