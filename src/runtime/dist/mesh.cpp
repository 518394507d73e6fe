#include "tessera/runtime/dist/mesh.h"

#include <algorithm>
#include <cstdint>
#include <numeric>
#include <thread>
#include <torch/csrc/distributed/c10d/PrefixStore.hpp>

#include "base/random_name.h"
#include "runtime/dist/message.h"
#include "tessera/base/error.h"

namespace tessera::dist {
namespace {

using Axes = std::vector<std::pair<std::string, int>>;

std::string shape_text(const Axes& axes) {
  std::string text;
  for (const auto& [name, size] : axes) {
    text += (text.empty() ? "" : ", ") + name + " " + std::to_string(size);
  }
  return text;
}

[[noreturn]] void refuse_axes(const Axes& axes, const std::string& expected) {
  throw Error::expected(ErrorKind::invalid_argument, {}, "mesh", expected, shape_text(axes));
}

/// Returns `axes` with the size -1 replaced by the world size divided by the other sizes; without
/// axes, one axis `shard`. Throws if the sizes do not fit the world size.
Axes complete(Axes axes, int world_size) {
  if (axes.empty()) axes = {{"shard", world_size}};
  std::int64_t product = 1;
  std::pair<std::string, int>* open = nullptr;
  for (auto& axis : axes) {
    if (axis.second == -1 && open == nullptr) {
      open = &axis;
    } else if (axis.second < 1 || axis.second > world_size) {
      refuse_axes(axes, "sizes from 1 to " + std::to_string(world_size) +
                            " (the number of ranks), at most one of them -1");
    } else if (product <= world_size) {  // else it is too large already, and could overflow
      product *= axis.second;
    }
    const auto has_name = [&](const auto& other) { return other.first == axis.first; };
    if (std::ranges::count_if(axes, has_name) > 1) {
      refuse_axes(axes, "axes of different names");
    }
  }
  if (open != nullptr && world_size % product == 0) {
    open->second = static_cast<int>(world_size / product);
    product = world_size;
  }
  if (product != world_size) {
    refuse_axes(axes,
                "sizes whose product is " + std::to_string(world_size) + ", the number of ranks");
  }
  return axes;
}

/// Agrees on a name that no other mesh of the store has, so that a mesh reads no messages of
/// another one. Ranks do not count their meshes: a store may have the keys of ranks that died
/// (torchrun starts ranks again with the same store, and not all hosts count the restarts), and a
/// rank may have tried once more than others. Instead each rank asks under a new random name. Rank
/// 0 answers with its own random name, which becomes that of the mesh.
class Agreement {
 public:
  Agreement(c10::intrusive_ptr<c10d::Store> store, int world_size,
            std::chrono::milliseconds timeout)
      : store_(std::move(store)), world_size_(world_size), timeout_(timeout) {}

  std::string name_of_mesh(int rank) const {
    const std::string own = tessera::detail::random_name();
    if (rank == 0) {
      answer(own);
      return own;
    }
    store_->set(key_of_request(rank), own);
    store_->wait({key_of_answer(own)}, timeout_);
    const std::string name = text_of(key_of_answer(own));
    store_->set(key_of_ready(name, rank), "+");
    return name;
  }

 private:
  static std::string key_of_request(int rank) { return "request/" + std::to_string(rank); }
  static std::string key_of_answer(const std::string& request) { return "answer/" + request; }
  static std::string key_of_ready(const std::string& mesh, int rank) {
    return mesh + "/ready/" + std::to_string(rank);
  }
  std::string text_of(const std::string& key) const {
    const std::vector<std::uint8_t> bytes = store_->get(key);
    return {bytes.begin(), bytes.end()};
  }

  /// Answers the requests of the other ranks until each has read an answer. Answers a rank again if
  /// it asks again: its first request may be one of a rank that died, or that gave up.
  void answer(const std::string& name) const {
    const auto end = std::chrono::steady_clock::now() + timeout_;
    std::vector<int> waiting(static_cast<std::size_t>(world_size_ - 1));
    std::iota(waiting.begin(), waiting.end(), 1);
    std::vector<std::string> answered(static_cast<std::size_t>(world_size_));
    while (true) {
      std::erase_if(waiting, [&](int rank) { return store_->check({key_of_ready(name, rank)}); });
      if (waiting.empty()) return;
      for (const int rank : waiting) {
        if (!store_->check({key_of_request(rank)})) continue;
        std::string request = text_of(key_of_request(rank));
        std::string& last = answered[static_cast<std::size_t>(rank)];
        if (request == last) continue;
        store_->set(key_of_answer(request), name);
        last = std::move(request);
      }
      if (std::chrono::steady_clock::now() > end) {
        throw Error(ErrorKind::io, {},
                    "rank " + std::to_string(waiting.front()) + " did not connect within " +
                        std::to_string(timeout_.count()) + " ms");
      }
      std::this_thread::sleep_for(std::chrono::milliseconds(2));
    }
  }

  c10::intrusive_ptr<c10d::Store> store_;
  int world_size_;
  std::chrono::milliseconds timeout_;
};

class Connector {
 public:
  Connector(const c10::intrusive_ptr<c10d::Store>& store, int rank, int world_size,
            const MeshOptions& options)
      : options_(options) {
    if (!store || (world_size == 1 && !options.transport.connects_one_rank)) return;
    try {
      const std::string prefix = "tessera/" + std::to_string(world_size) + "/";
      const std::string name = Agreement(c10::make_intrusive<c10d::PrefixStore>(prefix, store),
                                         world_size, options.timeout)
                                   .name_of_mesh(rank);
      store_ = c10::make_intrusive<c10d::PrefixStore>(prefix + name, store);
    } catch (const std::exception& error) {
      throw Error(ErrorKind::io, {},
                  "rank " + std::to_string(rank) + " of " + std::to_string(world_size) +
                      ": cannot meet the other ranks through the store: " + message_of(error));
    }
  }

  /// Connects this rank to the group's other ranks. `key` must be unique among the groups of the
  /// store.
  std::shared_ptr<Group> connect(const std::string& name, const std::string& key, int rank,
                                 int size) const {
    const Transport& transport = options_.transport;
    if (size == 1 && !(transport.connects_one_rank && store_)) {
      return std::make_shared<Group>(name, transport.device);
    }
    const auto connect = [name, rank, size, transport, timeout = options_.timeout](
                             const c10::intrusive_ptr<c10d::Store>& store) {
      try {
        return transport.connect(store, rank, size, timeout);
      } catch (const std::exception& error) {
        throw Error(ErrorKind::io, {},
                    "rank " + std::to_string(rank) + " of " + std::to_string(size) + " (" + name +
                        "): cannot connect over " + transport.name + ": " + message_of(error));
      }
    };
    return std::make_shared<Group>(name, c10::make_intrusive<c10d::PrefixStore>(key, store_),
                                   connect, transport.device);
  }

 private:
  c10::intrusive_ptr<c10d::Store> store_;
  const MeshOptions& options_;
};

}  // namespace

Mesh::Mesh() : world_(std::make_shared<Group>("shard")), axes_{{"shard", world_}} {}

Mesh::Mesh(std::shared_ptr<Group> world, std::vector<Axis> axes)
    : world_(std::move(world)), axes_(std::move(axes)) {
  int product = 1;
  for (const Axis& axis : axes_) product *= axis.group->size();
  TESSERA_CHECK(product == world_->size());
}

const std::shared_ptr<Group>& Mesh::axis(const std::string& name) const {
  std::string names;
  for (const Axis& axis : axes_) {
    if (axis.name == name) return axis.group;
    names += (names.empty() ? "" : ", ") + axis.name;
  }
  throw Error::expected(ErrorKind::invalid_argument, {}, "mesh axis", "one of " + names, name);
}

Mesh connect(const c10::intrusive_ptr<c10d::Store>& store, int rank, int world_size,
             const MeshOptions& options) {
  if (world_size < 1 || rank < 0 || rank >= world_size) {
    throw Error::expected(ErrorKind::invalid_argument, {}, "rank",
                          "a rank from 0 to world size - 1",
                          "rank " + std::to_string(rank) + " of " + std::to_string(world_size));
  }
  const Axes axes = complete(options.axes, world_size);
  if (store) store->setTimeout(options.timeout);
  const Connector connector(store, rank, world_size, options);
  if (axes.size() == 1) {
    const auto world = connector.connect(axes[0].first, axes[0].first, rank, world_size);
    return {world, {{axes[0].first, world}}};
  }
  const auto world = connector.connect("world", "world", rank, world_size);
  std::vector<Mesh::Axis> groups;
  int stride = world_size;
  for (const auto& [name, size] : axes) {
    stride /= size;
    const int coordinate = rank / stride % size;
    const int first = rank - coordinate * stride;  // rank in the world of the group's rank 0
    groups.push_back(
        {name, connector.connect(name, name + "/" + std::to_string(first), coordinate, size)});
  }
  return {world, std::move(groups)};
}

}  // namespace tessera::dist
