#include "formats/pickle/fetched_slots.h"

#include <algorithm>
#include <charconv>
#include <cstddef>

#include "formats/pickle/opcode.h"
#include "formats/pickle/opcode_argument.h"

namespace tessera::formats::pickle {
namespace {

/// Walks over the opcodes of a pickle.
class SlotWalk {
 public:
  explicit SlotWalk(PickleBytes& pickle) : pickle_(pickle) {}

  std::vector<bool> find(std::size_t pickle_begin) {
    const bool was_loaded = pickle_.is_loaded();
    position_ = released_end_ = pickle_begin;
    while (!ended_ && position_ < pickle_.size()) {
      if (!was_loaded && position_ - released_end_ >= kReleasedNbytes) {
        released_end_ = pickle_.release(released_end_, position_);
      }
      const auto opcode = static_cast<unsigned char>(number_at(position_++, 1));
      const std::size_t begin = position_;
      const Argument argument = kArgumentOf[opcode];
      ended_ = argument == Argument::no_opcode;
      skip_argument(*this, argument);
      if (!ended_) note(static_cast<Opcode>(opcode), begin);
    }
    if (!was_loaded) pickle_.unload(pickle_begin);
    return std::move(fetched_);
  }

  // --- for skip_argument
  void skip_bytes(std::uint64_t nbytes) {
    ended_ = nbytes > pickle_.size() - position_;
    if (!ended_) position_ += nbytes;
  }
  void skip_length(std::size_t width) {
    const std::size_t begin = position_;
    skip_bytes(width);
    if (!ended_) skip_bytes(number_at(begin, width));
  }
  void skip_line() {
    const auto end = pickle_.find('\n', position_);
    ended_ = !end;
    if (end) position_ = *end + 1;
  }

 private:
  static constexpr std::size_t kReleasedNbytes = std::size_t{1} << 20;

  std::uint64_t number_at(std::size_t begin, std::size_t width) const {
    pickle_.load(begin + width);
    std::uint64_t number = 0;
    for (std::size_t i = 0; i < width; ++i) {
      number |= std::uint64_t{static_cast<unsigned char>(pickle_.data()[begin + i])} << (8 * i);
    }
    return number;
  }

  /// Notes the memo slot if the opcode fetches one. Its argument begins at `begin`.
  void note(Opcode opcode, std::size_t begin) {
    switch (opcode) {
      case Opcode::STOP:
        ended_ = true;
        return;
      case Opcode::BINGET:
        return note_slot(number_at(begin, 1));
      case Opcode::LONG_BINGET:
        return note_slot(number_at(begin, 4));
      case Opcode::GET: {
        std::uint64_t slot = 0;
        const char* const line = pickle_.data() + begin;
        const auto parsed = std::from_chars(line, pickle_.data() + position_, slot);
        if (parsed.ptr != line) note_slot(slot);
        return;
      }
      default:
        return;
    }
  }
  void note_slot(std::uint64_t slot) {
    if (slot >= pickle_.size()) return;  // the reader refuses such a slot
    if (slot >= fetched_.size()) {
      fetched_.resize(
          std::min(std::max<std::size_t>(slot + 1, 2 * fetched_.size()), pickle_.size()));
    }
    fetched_[slot] = true;
  }

  PickleBytes& pickle_;
  std::size_t position_ = 0;
  std::size_t released_end_ = 0;
  bool ended_ = false;
  std::vector<bool> fetched_;
};

}  // namespace

std::vector<bool> fetched_slots(PickleBytes& pickle, std::size_t begin) {
  return SlotWalk(pickle).find(begin);
}

}  // namespace tessera::formats::pickle
