#include "object_store/announced_reads.h"

#include <algorithm>
#include <iterator>
#include <numeric>

#include "base/checked_math.h"
#include "base/lock_while_forking.h"

namespace tessera::object_store {
namespace {

constexpr std::size_t kMaxRunsAhead = 64;  // looked at for one read
/// If less than one in so many bytes is read again, such as the bytes around an element of DCP,
/// then dropped bytes are not worth another request.
constexpr std::uint64_t kMostRepeatedPart = 8;
/// The runs in a cell of this size of the file are requested together, also if some are read much
/// later: one request for each small tensor would take too long. Cells, unlike ranges that begin at
/// the run which is read first, leave no small ranges between them.
constexpr std::uint64_t kCellNbytes = std::uint64_t{2} << 20;

/// The announcements of all jobs, by URL.
struct Announcements {
  std::mutex mutex;
  std::map<std::string, std::shared_ptr<ReadList>> lists;

  static Announcements& of_process() {
    static auto& announcements = []() -> Announcements& {
      tessera::detail::lock_while_forking<mutex_of_process>();
      return *new Announcements;  // never destroyed: files may be read until the end
    }();
    return announcements;
  }
  static std::mutex& mutex_of_process() { return of_process().mutex; }
};

}  // namespace

void ByteSet::add(ByteRange range) {
  if (range.empty()) return;
  auto next = ends_.upper_bound(range.begin);
  if (next != ends_.begin() && std::prev(next)->second >= range.begin) --next;
  while (next != ends_.end() && next->first <= range.end) {
    range.begin = std::min(range.begin, next->first);
    range.end = std::max(range.end, next->second);
    next = ends_.erase(next);
  }
  ends_.emplace(range.begin, range.end);
}

void ByteSet::remove(ByteRange range) {
  auto next = ends_.upper_bound(range.begin);
  if (next != ends_.begin() && std::prev(next)->second > range.begin) --next;
  while (next != ends_.end() && next->first < range.end) {
    const ByteRange known{next->first, next->second};
    next = ends_.erase(next);
    if (known.begin < range.begin) ends_.emplace(known.begin, range.begin);
    if (known.end > range.end) ends_.emplace(range.end, known.end);
  }
}

std::vector<ByteRange> ByteSet::missing(ByteRange range) const {
  std::vector<ByteRange> parts;
  auto next = ends_.upper_bound(range.begin);
  if (next != ends_.begin()) range.begin = std::max(range.begin, std::prev(next)->second);
  for (; next != ends_.end() && next->first < range.end; ++next) {
    parts.push_back({range.begin, next->first});
    range.begin = next->second;
  }
  if (range.begin < range.end) parts.push_back(range);
  return parts;
}

ReadList::ReadList(const std::vector<ByteRange>& in_order) {
  ByteSet listed;
  std::uint64_t new_nbytes = 0;
  std::uint64_t repeated_nbytes = 0;
  for (const ByteRange range : in_order) {
    repeated_nbytes += range.nbytes();
    for (const ByteRange part : listed.missing(range)) {
      new_nbytes += part.nbytes();
      repeated_nbytes -= part.nbytes();
      if (!runs_.empty() && part.begin >= runs_.back().end &&
          part.begin - runs_.back().end <= kMaxGapNbytes) {
        listed.add({runs_.back().end, part.end});
        runs_.back().end = part.end;
      } else {
        listed.add(part);
        runs_.push_back(part);
      }
    }
  }
  is_read_again_ = repeated_nbytes > new_nbytes / kMostRepeatedPart;
  by_begin_.resize(runs_.size());
  std::iota(by_begin_.begin(), by_begin_.end(), std::size_t{0});
  std::ranges::sort(by_begin_, {}, [&](std::size_t run) { return runs_[run].begin; });
  places_.resize(runs_.size());
  for (std::size_t place = 0; place < by_begin_.size(); ++place) places_[by_begin_[place]] = place;
}

/// Returns a small run, together with the runs around it that are in the same cells of the file.
ByteRange ReadList::with_neighbours(std::size_t run) const {
  ByteRange range = runs_[run];
  const ByteRange cells{range.begin / kCellNbytes * kCellNbytes,
                        ceil_div(range.end, kCellNbytes) * kCellNbytes};
  for (std::size_t place = places_[run]; place > 0 && range.begin > cells.begin; --place) {
    const ByteRange before = runs_[by_begin_[place - 1]];
    if (before.end + kMaxGapNbytes < range.begin || before.end <= cells.begin) break;
    range.begin = std::max(before.begin, cells.begin);
  }
  for (std::size_t place = places_[run] + 1; place < by_begin_.size() && range.end < cells.end;
       ++place) {
    const ByteRange next = runs_[by_begin_[place]];
    if (next.begin > range.end + kMaxGapNbytes || next.begin >= cells.end) break;
    range.end = std::min(next.end, cells.end);
  }
  return range;
}

void ReadList::note_requested(ByteRange range) {
  const std::scoped_lock lock(mutex_);
  requested_.add(range);
}

void ReadList::note_dropped(ByteRange range) {
  if (!is_read_again_) return;
  const auto run = run_with(range.begin);
  // Reads of small runs may come in any order. To request their cell again for each of them would
  // fetch many times their bytes.
  if (!run || runs_[*run].nbytes() < kCellNbytes) return;
  const std::scoped_lock lock(mutex_);
  requested_.remove(range);
}

std::optional<std::size_t> ReadList::run_with(std::uint64_t offset) const {
  const auto after = std::ranges::upper_bound(by_begin_, offset, {},
                                              [&](std::size_t run) { return runs_[run].begin; });
  if (after == by_begin_.begin() || runs_[*std::prev(after)].end <= offset) return std::nullopt;
  return *std::prev(after);
}

std::vector<ByteRange> ReadList::next_after(ByteRange read, const ReadAheadSizes& sizes) const {
  const auto run_of_read = run_with(read.begin);
  if (!run_of_read) return {};
  const std::size_t first = *run_of_read;
  const std::size_t last = std::min(runs_.size(), first + kMaxRunsAhead);
  std::vector<ByteRange> ahead;
  ByteSet chosen;
  const auto choose = [&](ByteRange gap, std::uint64_t last_begin) {
    for (std::uint64_t begin = gap.begin; begin < std::min(gap.end, last_begin);
         begin += sizes.window_nbytes) {
      ahead.push_back({begin, std::min(gap.end, begin + sizes.window_nbytes)});
      chosen.add(ahead.back());
    }
  };
  std::uint64_t rest_nbytes = sizes.ahead_nbytes;
  const std::scoped_lock lock(mutex_);
  for (std::size_t run = first; run < last && rest_nbytes > 0; ++run) {
    const std::uint64_t end = runs_[run].end;
    const bool is_small = runs_[run].nbytes() < kCellNbytes;
    const bool is_rest = run == first && !is_small;
    const std::uint64_t begin = is_rest ? std::min(read.end, end) : runs_[run].begin;
    const std::uint64_t wanted_end = std::min(end, begin + rest_nbytes);
    rest_nbytes -= wanted_end - begin;
    if (requested_.missing({begin, wanted_end}).empty()) continue;
    // Whole windows need fewer requests, so the last one may end behind `wanted_end`.
    const ByteRange range = is_small
                                ? with_neighbours(run)
                                : ByteRange{begin, std::min(end, wanted_end + sizes.window_nbytes)};
    const std::uint64_t last_begin = is_small ? range.end : wanted_end;
    for (const ByteRange gap : requested_.missing(range)) {
      for (const ByteRange part : chosen.missing(gap)) choose(part, last_begin);
    }
  }
  return ahead;
}

AnnouncedReads::AnnouncedReads(const std::map<std::string, std::vector<ByteRange>>& by_url) {
  for (const auto& [url, ranges] : by_url) lists_.emplace(url, std::make_shared<ReadList>(ranges));
  Announcements& announcements = Announcements::of_process();
  const std::scoped_lock lock(announcements.mutex);
  for (const auto& [url, list] : lists_) announcements.lists[url] = list;
}

AnnouncedReads::~AnnouncedReads() {
  if (lists_.empty()) return;
  Announcements& announcements = Announcements::of_process();
  const std::scoped_lock lock(announcements.mutex);
  for (const auto& [url, list] : lists_) {
    const auto found = announcements.lists.find(url);
    if (found != announcements.lists.end() && found->second == list) {
      announcements.lists.erase(found);
    }
  }
}

std::shared_ptr<ReadList> AnnouncedReads::of(const std::string& url) {
  Announcements& announcements = Announcements::of_process();
  const std::scoped_lock lock(announcements.mutex);
  const auto found = announcements.lists.find(url);
  const bool is_found = found != announcements.lists.end() && found->second->is_of_this_process();
  return is_found ? found->second : nullptr;
}

}  // namespace tessera::object_store
