#include "runtime/support/ranks.h"

#include <torch/torch.h>
#include <condition_variable>
#include <cstdio>
#include <cstdlib>
#include <exception>
#include <mutex>
#include <thread>
#include <torch/csrc/distributed/c10d/HashStore.hpp>
#include <vector>

namespace tessera::test {
namespace {

constexpr auto kTimeLimit = std::chrono::seconds(120);

struct Standing {
  std::mutex mutex;
  std::vector<std::string> places;
};

void print(Standing& where) {
  const std::lock_guard lock(where.mutex);
  for (std::size_t rank = 0; rank < where.places.size(); ++rank) {
    std::fprintf(stderr, "rank %zu was last at %s\n", rank, where.places[rank].c_str());
  }
}

thread_local Standing* standing = nullptr;
thread_local std::size_t own_rank = 0;

}  // namespace

void stand_at(std::string place) {
  if (standing == nullptr) return;
  const std::lock_guard lock(standing->mutex);
  standing->places[own_rank] = std::move(place);
}

void with_generator(const std::function<void()>& body) {
  static std::mutex mutex;
  const std::lock_guard lock(mutex);
  body();
}

void on_ranks(int world_size, const std::function<void(const dist::Mesh&)>& body,
              dist::MeshOptions options, const TransportOfRank& transport_of) {
  at::set_num_threads(1);
  options.timeout = std::min(options.timeout, std::chrono::milliseconds(20'000));
  const auto store = c10::make_intrusive<c10d::HashStore>();
  store->setTimeout(options.timeout);
  const auto num_ranks = static_cast<std::size_t>(world_size);
  Standing where;
  where.places.assign(num_ranks, "its start");
  std::vector<std::exception_ptr> failures(num_ranks);
  std::mutex mutex;
  std::condition_variable finished;
  std::size_t num_finished = 0;
  std::vector<std::thread> threads;
  for (std::size_t rank = 0; rank < num_ranks; ++rank) {
    threads.emplace_back([&, rank] {
      standing = &where;
      own_rank = rank;
      try {
        const int number = static_cast<int>(rank);
        dist::MeshOptions its_options = options;
        its_options.transport = transport_of ? transport_of(number) : dist::gloo("lo");
        body(dist::connect(store, number, world_size, its_options));
        stand_at("its end");
      } catch (const std::exception& error) {
        failures[rank] = std::current_exception();
        stand_at(std::string("an exception: ") + error.what());
      }
      const std::lock_guard lock(mutex);
      ++num_finished;
      finished.notify_one();
    });
  }
  {
    std::unique_lock lock(mutex);
    if (!finished.wait_for(lock, kTimeLimit, [&] { return num_finished == num_ranks; })) {
      print(where);
      std::_Exit(124);
    }
  }
  for (std::thread& thread : threads) thread.join();
  for (const std::exception_ptr& failure : failures) {
    if (!failure) continue;
    print(where);  // shows all failures: the first rank's error may only follow from another rank's
    std::rethrow_exception(failure);
  }
}

}  // namespace tessera::test
