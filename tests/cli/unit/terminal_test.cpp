#include "cli/terminal.h"

#include <fcntl.h>
#include <gmock/gmock.h>
#include <unistd.h>

#include <cerrno>
#include <cstdlib>
#include <system_error>

#include "cli/exit_code.h"
#include "cli/json_output.h"
#include "cli/table.h"
#include "piped_streams.h"
#include "tessera/base/error.h"

namespace tessera::cli {
namespace {

using ::testing::HasSubstr;

// Shows row E6.
class TerminalTest : public ::testing::Test, protected PipedStreams {};

TEST_F(TerminalTest, BuffersTheResultUntilItIsFlushed) {
  Terminal terminal(out_[1], err_[1]);
  terminal.print("one\n");
  EXPECT_EQ(out(), "");
  terminal.flush();
  EXPECT_EQ(out(), "one\n");
}

TEST_F(TerminalTest, PrintsWhatCameBeforeAnErrorFirst) {
  Terminal terminal(out_[1], err_[1]);
  terminal.print("one\n");
  terminal.print_error("two");
  EXPECT_EQ(out(), "one\n");
  EXPECT_EQ(err(), "two\n");
}

TEST_F(TerminalTest, TellsEventsAtOnceAndLeavesTheResultUntilItsEnd) {
  Terminal terminal(out_[1], err_[1]);
  terminal.print("one\n");
  terminal.print_event("two");
  EXPECT_EQ(out(), "");
  EXPECT_EQ(err(), "two\n");
}

TEST_F(TerminalTest, DrawsNoStatusIntoAPipe) {
  Terminal terminal(out_[1], err_[1]);
  terminal.show_status("busy");
  terminal.show_status("");
  EXPECT_EQ(err(), "");
}

TEST_F(TerminalTest, HasNoColorInAPipeUnlessAsked) {
  Terminal terminal(out_[1], err_[1]);
  EXPECT_EQ(terminal.styled(Style::bad, "x"), "x");
  terminal.set_color(ColorChoice::always);
  EXPECT_EQ(terminal.styled(Style::bad, "x"), "\033[31mx\033[0m");
  EXPECT_EQ(terminal.styled(Style::plain, "x"), "x");
}

TEST_F(TerminalTest, TakesItsWidthFromColumnsWhereThereIsNoTerminal) {
  EXPECT_EQ(Terminal(out_[1], err_[1]).width(), 80);
  ::setenv("COLUMNS", "132", 1);
  EXPECT_EQ(Terminal(out_[1], err_[1]).width(), 132);
  ::setenv("COLUMNS", "wide", 1);
  EXPECT_EQ(Terminal(out_[1], err_[1]).width(), 80);
}

TEST_F(TerminalTest, SaysThatItsReaderHasGone) {
  Terminal terminal(out_[1], err_[1]);
  ::close(out_[0]);
  terminal.print("x");
  EXPECT_THROW(terminal.flush(), OutputClosed);
  out_[0] = ::open("/dev/null", O_RDONLY);
}

TEST_F(TerminalTest, SaysThatTheDiskUnderItsOutputIsFull) {
  const int full = ::open("/dev/full", O_WRONLY);
  ASSERT_GE(full, 0);
  {
    Terminal terminal(full, err_[1]);
    EXPECT_EQ(run_tool("tool", terminal,
                       [&] {
                         terminal.print("x");
                         return ExitCode::done;
                       }),
              4);
  }
  EXPECT_THAT(err(), HasSubstr("tool: standard output: cannot be written: No space left"));
  ::close(full);
}

TEST_F(TerminalTest, EveryErrorKindHasItsExitCodeAndOneLine) {
  Terminal terminal(out_[1], err_[1]);
  const auto code_of = [&](ErrorKind kind) {
    return run_tool("tool", terminal, [&]() -> ExitCode { throw Error(kind, {}, "broken"); });
  };
  EXPECT_EQ(code_of(ErrorKind::invalid_argument), 2);
  EXPECT_EQ(code_of(ErrorKind::already_exists), 2);
  EXPECT_EQ(code_of(ErrorKind::not_found), 3);
  EXPECT_EQ(code_of(ErrorKind::corruption), 3);
  EXPECT_EQ(code_of(ErrorKind::unsupported), 3);
  EXPECT_EQ(code_of(ErrorKind::mismatch), 3);
  EXPECT_EQ(code_of(ErrorKind::io), 4);
  EXPECT_EQ(err(),
            "tool: broken\ntool: broken\ntool: broken\ntool: broken\ntool: broken\n"
            "tool: broken\ntool: broken\n");
  EXPECT_EQ(code_of(ErrorKind::interrupted), 130);
}

TEST_F(TerminalTest, AFailureOfOurOwnIsToldFromAFailureOfTheInput) {
  Terminal terminal(out_[1], err_[1]);
  EXPECT_EQ(run_tool("tool", terminal,
                     []() -> ExitCode { throw InternalError("the impossible\nhappened"); }),
            70);
  EXPECT_EQ(err(), "tool: internal error: the impossible\\x0ahappened (please report this)\n");
  EXPECT_EQ(run_tool("tool", terminal, []() -> ExitCode { throw std::bad_alloc(); }), 4);
  // What std::thread throws at the limit of processes.
  EXPECT_EQ(
      run_tool("tool", terminal,
               []() -> ExitCode { throw std::system_error(EAGAIN, std::generic_category()); }),
      4);
  EXPECT_EQ(
      run_tool("tool", terminal,
               []() -> ExitCode { throw std::system_error(EINVAL, std::generic_category()); }),
      70);
}

TEST_F(TerminalTest, TableAlignsColumnsWithoutTrailingSpaces) {
  Terminal terminal(out_[1], err_[1]);
  Table table({Table::Align::left, Table::Align::right, Table::Align::left});
  table.add_row({{"a"}, {"1"}, {"x"}});
  table.add_row({{"weight"}, {"1024"}, {""}});
  table.add_row({{"größe"}});
  table.print(terminal);
  terminal.flush();
  EXPECT_EQ(out(), "a          1  x\nweight  1024\ngröße\n");
}

TEST_F(TerminalTest, TableCutsNothingInAPipe) {
  Terminal terminal(out_[1], err_[1]);
  Table table({Table::Align::left, Table::Align::left});
  table.let_shrink(0);
  table.add_row({{std::string(200, 'n')}, {"x"}});
  table.print(terminal);
  terminal.flush();
  EXPECT_EQ(out(), std::string(200, 'n') + "  x\n");
}

TEST_F(TerminalTest, JsonStandsOneItemPerLine) {
  Terminal terminal(out_[1], err_[1]);
  JsonOutput json(terminal, 1);
  json.key("tensors").begin_array();
  const std::vector<std::int64_t> shape = {2, 3};
  json.begin_object().member("name", "a\"b").key("shape").value(shape).end_object();
  json.begin_object().member("mean", 0.5).member("max", 1.0 / 0.0).end_object();
  json.end_array();
  json.key("empty").begin_array().end_array();
  json.key("values").begin_object().key("step").raw("7").end_object();
  json.finish();
  terminal.flush();
  EXPECT_EQ(out(),
            "{\n \"schema\": 1,\n \"tensors\": [\n"
            "  {\"name\": \"a\\\"b\", \"shape\": [2, 3]},\n"
            "  {\"mean\": 0.5, \"max\": null}\n ],\n"
            " \"empty\": [],\n"
            " \"values\": {\n  \"step\": 7\n }\n}\n");
}

TEST(ShortenTest, KeepsTheEndAndCountsCodePoints) {
  EXPECT_EQ(shorten_front("abcdef", 6), "abcdef");
  EXPECT_EQ(shorten_front("abcdefgh", 5), "…efgh");
  EXPECT_EQ(shorten_front("äöüäöü", 4), "…äöü");
  EXPECT_EQ(shorten_front("abc", 1), "…");
  EXPECT_EQ(shorten_front("abc", 0), "");
}

}  // namespace
}  // namespace tessera::cli
