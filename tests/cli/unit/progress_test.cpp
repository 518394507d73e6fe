#include "cli/progress.h"

#include <gmock/gmock.h>

#include <chrono>
#include <cstdint>
#include <sstream>
#include <stdexcept>
#include <string>
#include <vector>

#include "base/json.h"
#include "piped_streams.h"

namespace tessera::cli {
namespace {

// Shows row E6.
class ProgressTest : public ::testing::Test, protected PipedStreams {
 protected:
  // Returns the progress lines (JSON) printed since the last call, without their time.
  std::vector<std::string> told() const {
    std::vector<std::string> lines;
    std::istringstream text(err());
    for (std::string line; std::getline(text, line);) {
      const Value event = parse_json(line, "line");
      EXPECT_NE(event.find("seconds"), nullptr) << line;
      lines.push_back(line.substr(0, line.find(",\"seconds\"")));
    }
    return lines;
  }
  static std::string event(const std::string& state, int done, int total, int kept) {
    return R"({"schema":1,"verb":"report","phase":"diff","state":")" + state +
           R"(","done_nbytes":)" + std::to_string(done) + R"(,"total_nbytes":)" +
           std::to_string(total) + R"(,"kept_nbytes":)" + std::to_string(kept);
  }

  Terminal terminal_{out_[1], err_[1]};
  ProgressOptions json_{"report", ProgressDisplay::json};
};

using ::testing::ElementsAre;

TEST_F(ProgressTest, TellsTheBeginningAndTheEnd) {
  {
    Progress progress(terminal_, json_, "diff", 100);
    EXPECT_THAT(told(), ElementsAre(event("running", 0, 100, 0)));
    progress.add_kept(30);
    progress.add(100);
  }
  EXPECT_EQ(told().back(), event("done", 100, 100, 30));
}

TEST_F(ProgressTest, TellsMeanwhileAndNoMoreOftenThanTenTimesASecond) {
  using std::chrono::milliseconds;
  const auto start = std::chrono::steady_clock::now();
  const auto elapsed = [&] { return std::chrono::steady_clock::now() - start; };
  Progress progress(terminal_, json_, "diff", 1'000'000'000);
  told();
  while (elapsed() < milliseconds(350)) progress.add(1);
  progress.add(1);
  const std::vector<std::string> lines = told();
  EXPECT_GE(lines.size(), 1U);
  EXPECT_LE(static_cast<std::int64_t>(lines.size()), elapsed() / milliseconds(100));
}

TEST_F(ProgressTest, TellsHowFarWorkCameThatFailed) {
  try {
    Progress progress(terminal_, json_, "diff", 100);
    progress.add(30);
    throw std::runtime_error("the disk");
  } catch (const std::runtime_error&) {
    EXPECT_EQ(told().back(), event("failed", 30, 100, 0));
  }
}

TEST_F(ProgressTest, EndsAtTheTotalThatWasAnnounced) {
  for (const std::uint64_t nbytes : {99U, 101U}) {
    {
      Progress(terminal_, json_, "diff", 100).add(nbytes);
    }
    EXPECT_EQ(told().back(), event("done", 100, 100, 0));
  }
}

TEST_F(ProgressTest, IsSilentInAPipeUnlessJsonIsAskedFor) {
  for (const ProgressDisplay display : {ProgressDisplay::automatic, ProgressDisplay::none}) {
    Progress(terminal_, {"report", display}, "diff", 100).add(100);
  }
  EXPECT_EQ(err(), "");
}

TEST(ProgressLineTest, SaysHowFarHowFastAndHowLong) {
  EXPECT_EQ(progress_line("verify", 512U << 20, 1U << 30, 2.0),
            "verify   50 %  512.0 MiB of 1.0 GiB  256.0 MiB/s  2 s left");
  EXPECT_EQ(progress_line("verify", 0, 1024, 1.0), "verify    0 %  0 bytes of 1.0 KiB  0 bytes/s");
  EXPECT_EQ(progress_line("verify", 1024, 1024, 1.0),
            "verify  100 %  1.0 KiB of 1.0 KiB  1.0 KiB/s");
  EXPECT_EQ(progress_line("verify", 2048, 1024, 1.0),
            "verify  100 %  2.0 KiB of 1.0 KiB  2.0 KiB/s");
  EXPECT_EQ(progress_line("scan", 1024, 0, 1.0), "scan  1.0 KiB  1.0 KiB/s");
  EXPECT_EQ(progress_line("verify", 1, 7263, 1.0),
            "verify    0 %  1 byte of 7.1 KiB  1 byte/s  2 h 01 min left");
}

}  // namespace
}  // namespace tessera::cli
