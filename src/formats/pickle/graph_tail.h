#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

#include "formats/pickle/pickle_object.h"

namespace tessera::formats::pickle::detail {

/// The tables of a graph that is being read.
struct GraphTables {
  std::vector<Node>& nodes;
  std::vector<std::uint32_t>& links;
  std::vector<Global>& globals;
  std::vector<Call>& calls;
};

/// The objects of a graph from a certain object on, which can be dropped together. The tables must
/// outlive the tail. Not thread-safe.
class GraphTail {
 public:
  /// The tail begins after the last object of the graph.
  explicit GraphTail(GraphTables tables) : tables_(tables) { begin_behind_all(); }

  std::uint32_t first_node() const { return first_node_; }

  /// Makes the tail begin after the last object of the graph: it is then empty.
  void begin_behind_all();

  /// Drops the objects of the tail except those in `kept` and the objects that they refer to.
  /// Writes the new numbers of these objects into `kept`. Then makes the tail begin after the last
  /// object. Returns how many objects and links are kept. Requires: no object before the tail
  /// refers to an object in the tail. Cost: linear in the tail.
  std::size_t drop_all_but(std::span<std::uint32_t> kept);

 private:
  void mark(std::span<const std::uint32_t> kept);
  void move_marked();
  Slice move_links(const Slice& slice);
  std::uint32_t new_id(std::uint32_t id) const {
    return id < first_node_ ? id : new_ids_[id - first_node_];
  }

  GraphTables tables_;
  std::uint32_t first_node_ = 0;
  std::size_t first_link_ = 0;
  std::size_t first_global_ = 0;
  std::size_t first_call_ = 0;

  // Used only in drop_all_but. They are members so that each call uses their memory again.
  std::vector<std::uint32_t> new_ids_;  // of the tail's objects; kNoObject: dropped
  std::vector<std::uint32_t> open_;
  std::vector<Node> nodes_;
  std::vector<std::uint32_t> links_;
  std::vector<Global> globals_;
  std::vector<Call> calls_;
};

}  // namespace tessera::formats::pickle::detail
