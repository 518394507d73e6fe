#pragma once

#include <c10/core/Device.h>
#include <chrono>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <torch/csrc/distributed/c10d/Backend.hpp>
#include <torch/csrc/distributed/c10d/Store.hpp>
#include <vector>

#include "tessera/runtime/dist/group.h"

namespace tessera::dist {

/// How tensors are sent between the ranks of a group.
struct Transport {
  std::string name;
  /// The device of the small tensors that groups create for their own messages.
  at::Device device = at::kCPU;
  /// Whether a group of one rank also gets a backend, if there is a store. If false, collectives of
  /// such a group only copy.
  bool connects_one_rank = false;
  /// Connects rank `rank` of `size` ranks to the others, which share `store`. Collective.
  std::function<c10::intrusive_ptr<c10d::Backend>(const c10::intrusive_ptr<c10d::Store>& store,
                                                  int rank, int size,
                                                  std::chrono::milliseconds timeout)>
      connect;
};

/// Returns Gloo, which uses sockets. Gloo sends CPU tensors directly, and CUDA tensors through the
/// host. `interface`: the network interface to bind to, such as `eth0`. Empty: the interface in
/// GLOO_SOCKET_IFNAME; without this variable, that of the host's name; without that, loopback.
/// If another rank dies, no thread that uses the group gets SIGPIPE.
Transport gloo(const std::string& interface = {});

/// Returns NCCL through c10d, for CUDA tensors. Link the CMake target `tessera::nccl`, which exists
/// if torch has CUDA. `device_index`: this rank's GPU. Default: the local rank that the launcher
/// reports (see launch.h); 0 without a launcher. This GPU becomes the current device of the calling
/// thread. Throws: Error(unsupported) if there is no such GPU.
Transport nccl(std::optional<int> device_index = std::nullopt);

/// The ranks of a job as a grid with named axes, row-major: in a mesh of shape (A, B), rank =
/// a * B + b. Copies share their groups. What PyTorch calls DeviceMesh.
class Mesh {
 public:
  /// A named dimension of the grid, as this rank sees it.
  struct Axis {
    std::string name;
    std::shared_ptr<Group> group;  // this rank, and the ranks that differ from it only on this axis
  };

  /// Makes a mesh of this process alone, with one axis `shard`.
  Mesh();
  /// Makes a mesh of existing groups. `world` has all ranks. If there is only one axis, its group
  /// may be `world` itself. Requires: `world->size()` is the product of the axes' sizes.
  Mesh(std::shared_ptr<Group> world, std::vector<Axis> axes);

  int rank() const { return world_->rank(); }
  int world_size() const { return world_->size(); }
  const std::shared_ptr<Group>& world() const { return world_; }
  const std::vector<Axis>& axes() const { return axes_; }
  /// Returns the group of an axis. Throws: Error(invalid_argument) if this mesh has no such axis.
  const std::shared_ptr<Group>& axis(const std::string& name) const;

 private:
  std::shared_ptr<Group> world_;
  std::vector<Axis> axes_;
};

/// How to connect the ranks, and in which grid to arrange them.
struct MeshOptions {
  /// Names and sizes of the axes, outermost first. At most one size may be -1: it is computed from
  /// the world size. Empty: one axis `shard`.
  std::vector<std::pair<std::string, int>> axes{};
  /// How long a rank waits for another rank, in a collective or while connecting. `connect` also
  /// sets this time-out on the store.
  std::chrono::milliseconds timeout = std::chrono::minutes(5);
  /// What sends the tensors: `gloo()` or `nccl()`.
  Transport transport = gloo();
};

/// Connects the ranks that share `store` (may be null for one rank). Collective. Throws:
/// Error(invalid_argument) if the product of the axes' sizes is not `world_size`, or if `rank` is
/// not in [0, world_size); Error(io) if a rank cannot connect, or does not connect in time.
Mesh connect(const c10::intrusive_ptr<c10d::Store>& store, int rank, int world_size,
             const MeshOptions& options = {});

}  // namespace tessera::dist
