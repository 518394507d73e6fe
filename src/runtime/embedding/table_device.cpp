#include "runtime/embedding/table_device.h"

#include <c10/core/impl/VirtualGuardImpl.h>
#include <c10/util/Exception.h>

#include <optional>

#include "tessera/base/error.h"

namespace tessera::embedding {
namespace {

/// Returns `device` with an index. If it has none, adds the index of the current device of its
/// type.
at::Device with_index(at::Device device) {
  if (device.is_cpu() || device.has_index()) return device;
  return c10::impl::VirtualGuardImpl(device.type()).getDevice();
}

/// Returns the device of the collection's weights; the CPU if there are no tables. Throws if they
/// are on several devices.
at::Device device_of_weights(const EmbeddingBagCollectionBase& collection) {
  std::optional<at::Device> device;
  std::string first;
  for (const EmbeddingBagConfig& config : collection.tables().configs()) {
    const at::Device found = collection.weight(config.name).device();
    if (!device) {
      device = found;
      first = config.name;
    }
    if (found == *device) continue;
    throw Error::expected(ErrorKind::invalid_argument, {.fqn = config.name},
                          "device of the tables of a collection",
                          device->str() + ", as of table " + first, found.str(),
                          "choose one with ShardOptions::device");
  }
  return device.value_or(at::kCPU);
}

Error too_little(const TableMemory& memory, const std::string& where, const std::string& hint) {
  return Error::expected(ErrorKind::unsupported, {.fqn = memory.table}, "memory for " + memory.what,
                         std::to_string(memory.nbytes) + " bytes " + where,
                         "not enough free memory", hint);
}

}  // namespace

at::Device device_for_tables(const EmbeddingBagCollectionBase& collection, const dist::Mesh& mesh,
                             const ShardOptions& options) {
  const at::Device of_mesh = mesh.world()->device();
  at::Device device = at::kCPU;
  if (options.device) {
    device = with_index(*options.device);
  } else {
    const at::Device of_weights = device_of_weights(collection);
    const bool is_on_device = !of_weights.is_cpu() && !of_weights.is_meta();
    device = is_on_device ? of_weights : with_index(of_mesh);
  }
  const bool is_of_mesh = of_mesh.has_index() && !of_mesh.is_cpu()
                              ? device == of_mesh
                              : device.type() == of_mesh.type();
  if (mesh.world_size() > 1 && !is_of_mesh) {
    throw Error::expected(ErrorKind::invalid_argument, {}, "device of embedding tables",
                          "a device for which the mesh has collectives, such as " + of_mesh.str(),
                          device.str());
  }
  return device;
}

void allocate_on(at::Device device, const TableMemory& memory,
                 const std::function<void()>& allocate) {
  try {
    allocate();
  } catch (const c10::OutOfMemoryError&) {
    throw too_little(memory, "on " + device.str(),
                     "shard the table over more ranks, or keep only some rows on the device "
                     "(ShardOptions::cached_rows)");
  } catch (const c10::Error&) {
    if (!device.is_cpu()) throw;
    throw too_little(memory, "on cpu", "shard the table over more ranks");
  }
}

void allocate_pinned(const TableMemory& memory, const std::function<void()>& allocate) {
  try {
    allocate();
  } catch (const c10::Error&) {
    throw too_little(memory, "of pinned host memory", "shard the table over more ranks");
  }
}

}  // namespace tessera::embedding
