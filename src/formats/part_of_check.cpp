#include "formats/part_of_check.h"

#include <iterator>

#include "tessera/base/error.h"

namespace tessera::formats {

void CountedNote::add_name(std::string name) {
  names.insert(std::move(name));
  if (names.size() > kMaxNames) names.erase(std::prev(names.end()));
}

void CountedNote::merge(const CountedNote& other) {
  TESSERA_CHECK(kind == other.kind && path == other.path && unit == other.unit);
  num_members += other.num_members;
  num_without_crc += other.num_without_crc;
  for (const std::string& name : other.names) add_name(name);
}

std::optional<Finding> CountedNote::finding() const {
  Finding note;
  note.severity = Finding::Severity::note;
  note.where.path = path;
  if (kind == Kind::absent_crcs) {
    if (num_without_crc == 0) return std::nullopt;
    note.rule = "crc-absent";
    note.expected = "a CRC-32 for each of " + std::to_string(num_members) + " members";
    note.found = "none for " + std::to_string(num_without_crc);
    return note;
  }
  if (names.empty()) return std::nullopt;
  note.rule = "foreign";
  note.expected = "only classes and functions of tensors and plain values";
  for (const std::string& name : names) note.found += (note.found.empty() ? "" : ", ") + name;
  note.found += "; nothing was executed";
  return note;
}

PartOfCheck::PartOfCheck(int index, int num_parts) : index_(index) {
  TESSERA_CHECK(0 <= index && index < num_parts);
  for (int part = 0; part < num_parts; ++part) loads_.emplace(0, part);
}

PartOfCheck PartOfCheck::planned(int index, int num_parts) {
  PartOfCheck part(index, num_parts);
  part.is_only_planned_ = true;
  return part;
}

bool PartOfCheck::takes(std::uint64_t nbytes) {
  ++num_units_;
  int owner = index_;
  if (!loads_.empty()) {
    const auto [load, part] = loads_.top();
    loads_.pop();
    loads_.emplace(load + nbytes, part);
    owner = part;
  }
  if (owner != index_) return false;
  nbytes_ += nbytes;
  return !is_only_planned_;
}

void PartOfCheck::report(CountedNote note, const FindingSink& sink) {
  if (!loads_.empty()) {
    note.unit = num_units_;
    notes_.push_back(std::move(note));
  } else if (const auto finding = note.finding()) {
    sink(*finding);
  }
}

void verify_part(const CheckpointReader& reader, const FindingSink& sink,
                 const ProgressSink& progress, int num_threads, PartOfCheck& part) {
  if (const auto* const divided = dynamic_cast<const DividedCheck*>(&reader)) {
    divided->verify_part(sink, progress, num_threads, part);
    return;
  }
  std::uint64_t nbytes = 0;
  for (const TensorEntry& tensor : reader.contents().tensors) {
    for (const Piece& piece : tensor.pieces) nbytes += nbytes_of(piece.region, tensor.meta.dtype);
  }
  if (part.takes(nbytes)) reader.verify(sink, progress, num_threads);
}

}  // namespace tessera::formats
