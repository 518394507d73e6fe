#include "formats/pickle/graph_tail.h"

namespace tessera::formats::pickle::detail {
namespace {

/// Calls `visit` with each object that `id` refers to.
template <class Visit>
void for_each_part(const GraphTables& tables, std::uint32_t id, const Visit& visit) {
  const auto visit_slice = [&](const Slice& slice) {
    for (std::uint32_t i = 0; i < slice.size; ++i) visit(tables.links[slice.begin + i]);
  };
  const Node& node = tables.nodes[id];
  switch (node.kind) {
    case ObjectKind::list:
    case ObjectKind::tuple:
    case ObjectKind::set:
    case ObjectKind::dict:
      return visit_slice(node.slice);
    case ObjectKind::call: {
      const Call& call = tables.calls[node.index];
      visit(call.callable);
      visit(call.arguments);
      if (call.state != kNoObject) visit(call.state);
      visit_slice(call.appended);
      return visit_slice(call.entries);
    }
    case ObjectKind::persistent:
      return visit(node.index);
    default:
      return;
  }
}

template <class T>
void replace_from(std::vector<T>& table, std::size_t begin, std::vector<T>& with) {
  table.erase(table.begin() + static_cast<std::ptrdiff_t>(begin), table.end());
  table.insert(table.end(), with.begin(), with.end());
  with.clear();
}

}  // namespace

void GraphTail::begin_behind_all() {
  first_node_ = static_cast<std::uint32_t>(tables_.nodes.size());
  first_link_ = tables_.links.size();
  first_global_ = tables_.globals.size();
  first_call_ = tables_.calls.size();
}

void GraphTail::mark(std::span<const std::uint32_t> kept) {
  constexpr std::uint32_t kMarked = 0;
  new_ids_.assign(tables_.nodes.size() - first_node_, kNoObject);
  const auto reach = [&](std::uint32_t id) {
    if (id < first_node_ || new_ids_[id - first_node_] == kMarked) return;
    new_ids_[id - first_node_] = kMarked;
    open_.push_back(id);
  };
  for (const std::uint32_t id : kept) reach(id);
  while (!open_.empty()) {
    const std::uint32_t id = open_.back();
    open_.pop_back();
    for_each_part(tables_, id, reach);
  }
  std::uint32_t next = first_node_;
  for (std::uint32_t& id : new_ids_) {
    if (id == kMarked) id = next++;
  }
}

Slice GraphTail::move_links(const Slice& slice) {
  const auto begin = static_cast<std::uint32_t>(first_link_ + links_.size());
  for (std::uint32_t i = 0; i < slice.size; ++i) {
    links_.push_back(new_id(tables_.links[slice.begin + i]));
  }
  return {.begin = begin, .size = slice.size, .capacity = slice.size};
}

/// Copies the marked objects, with their new numbers.
void GraphTail::move_marked() {
  for (std::size_t i = 0; i < new_ids_.size(); ++i) {
    if (new_ids_[i] == kNoObject) continue;
    Node& node = nodes_.emplace_back(tables_.nodes[first_node_ + i]);
    switch (node.kind) {
      case ObjectKind::list:
      case ObjectKind::tuple:
      case ObjectKind::set:
      case ObjectKind::dict:
        node.slice = move_links(node.slice);
        break;
      case ObjectKind::call: {
        Call& call = calls_.emplace_back(tables_.calls[node.index]);
        call.callable = new_id(call.callable);
        call.arguments = new_id(call.arguments);
        if (call.state != kNoObject) call.state = new_id(call.state);
        call.appended = move_links(call.appended);
        call.entries = move_links(call.entries);
        node.index = static_cast<std::uint32_t>(first_call_ + calls_.size() - 1);
        break;
      }
      case ObjectKind::global:
        globals_.push_back(tables_.globals[node.index]);
        node.index = static_cast<std::uint32_t>(first_global_ + globals_.size() - 1);
        break;
      case ObjectKind::persistent:
        node.index = new_id(node.index);
        break;
      default:
        break;
    }
  }
}

std::size_t GraphTail::drop_all_but(std::span<std::uint32_t> kept) {
  if (!kept.empty()) {
    mark(kept);
    move_marked();
    for (std::uint32_t& id : kept) id = new_id(id);
  }
  const std::size_t num_kept = nodes_.size() + links_.size();
  replace_from(tables_.nodes, first_node_, nodes_);
  replace_from(tables_.links, first_link_, links_);
  replace_from(tables_.globals, first_global_, globals_);
  replace_from(tables_.calls, first_call_, calls_);
  begin_behind_all();
  return num_kept;
}

}  // namespace tessera::formats::pickle::detail
