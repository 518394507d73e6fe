#include "object_store/announced_reads.h"

#include <algorithm>
#include <iterator>
#include <numeric>

#include "base/lock_while_forking.h"

namespace tessera::object_store {
namespace {

constexpr std::size_t kMaxRunsAhead = 64;  // looked at for one read
/// Smaller runs are requested together with the runs that follow them in the file, up to this size,
/// also if those are read much later. One request for each small tensor would take too long.
constexpr std::uint64_t kNeighbourhoodNbytes = std::uint64_t{2} << 20;

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
  for (const ByteRange range : in_order) {
    for (const ByteRange part : listed.missing(range)) {
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
  by_begin_.resize(runs_.size());
  std::iota(by_begin_.begin(), by_begin_.end(), std::size_t{0});
  std::ranges::sort(by_begin_, {}, [&](std::size_t run) { return runs_[run].begin; });
  places_.resize(runs_.size());
  for (std::size_t place = 0; place < by_begin_.size(); ++place) places_[by_begin_[place]] = place;
}

/// Returns the end of a run, or, if it is small, of the runs behind it that one request can read.
std::uint64_t ReadList::end_with_neighbours(std::size_t run) const {
  std::uint64_t end = runs_[run].end;
  for (std::size_t place = places_[run] + 1; place < by_begin_.size(); ++place) {
    const ByteRange next = runs_[by_begin_[place]];
    const bool is_near = next.begin <= end + kMaxGapNbytes;
    if (!is_near || next.end > runs_[run].begin + kNeighbourhoodNbytes) break;
    end = std::max(end, next.end);
  }
  return end;
}

void ReadList::note_requested(ByteRange range) {
  const std::scoped_lock lock(mutex_);
  requested_.add(range);
}

std::vector<ByteRange> ReadList::next_after(ByteRange read, const ReadAheadSizes& sizes) const {
  const auto after = std::ranges::upper_bound(by_begin_, read.begin, {},
                                              [&](std::size_t run) { return runs_[run].begin; });
  if (after == by_begin_.begin() || runs_[*std::prev(after)].end <= read.begin) return {};
  const std::size_t first = *std::prev(after);
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
    const std::uint64_t begin = run == first ? std::min(read.end, end) : runs_[run].begin;
    const std::uint64_t wanted_end = std::min(end, begin + rest_nbytes);
    rest_nbytes -= wanted_end - begin;
    if (requested_.missing({begin, wanted_end}).empty()) continue;
    const std::uint64_t neighbours_end = end_with_neighbours(run);
    // Whole windows need fewer requests, so the last one may end behind `wanted_end`.
    const std::uint64_t last_begin = neighbours_end > end ? neighbours_end : wanted_end;
    const std::uint64_t range_end = std::min(neighbours_end, last_begin + sizes.window_nbytes);
    for (const ByteRange gap : requested_.missing({begin, range_end})) {
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
