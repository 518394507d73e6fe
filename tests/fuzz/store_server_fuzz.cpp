// Feeds what a server sends to the object store, by way of libcurl and a socket: status, headers
// and body of each answer.
#include <arpa/inet.h>
#include <netinet/in.h>
#include <sys/socket.h>
#include <unistd.h>

#include <algorithm>
#include <cstdint>
#include <cstdlib>
#include <mutex>
#include <string>
#include <string_view>
#include <thread>
#include <vector>

#include "object_store/bucket_listing.h"
#include "object_store/http_server.h"
#include "object_store/s3_server.h"
#include "object_store/s3_uploads.h"
#include "tessera/base/error.h"

namespace {

using namespace tessera;

constexpr std::string_view kSeparator = "\n====\n";

/// A proxy on this machine that answers the requests to all servers. kSeparator divides an input
/// into answers, each `<status>\n{<header>\n}\n<body>`. The n-th request gets the n-th answer, and
/// requests after the last answer get status 404. If the headers of an answer state no length, the
/// proxy adds the right length, and keeps the connection open.
class Proxy {
 public:
  Proxy() : listener_(::socket(AF_INET, SOCK_STREAM, 0)) {
    sockaddr_in address{};
    address.sin_family = AF_INET;
    address.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
    socklen_t nbytes = sizeof address;
    auto* const any = reinterpret_cast<sockaddr*>(&address);
    if (::bind(listener_, any, nbytes) != 0 || ::listen(listener_, 16) != 0 ||
        ::getsockname(listener_, any, &nbytes) != 0) {
      std::abort();
    }
    const std::string url = "http://127.0.0.1:" + std::to_string(ntohs(address.sin_port));
    for (const char* name : {"http_proxy", "https_proxy", "HTTPS_PROXY", "all_proxy"}) {
      ::setenv(name, url.c_str(), 1);
    }
    for (const char* name : {"no_proxy", "NO_PROXY"}) ::unsetenv(name);
    std::thread([this] { serve(); }).detach();
  }

  void set_answers(std::string_view input) {
    const std::scoped_lock lock(mutex_);
    answers_.clear();
    for (;;) {
      const std::size_t end = input.find(kSeparator);
      answers_.emplace_back(input.substr(0, end));
      if (end == std::string_view::npos) break;
      input.remove_prefix(end + kSeparator.size());
    }
    std::ranges::reverse(answers_);
  }

 private:
  void serve() {
    for (;;) {
      const int connection = ::accept(listener_, nullptr, nullptr);
      if (connection < 0) continue;
      // Close a connection that is not used again, so that the next one is accepted soon.
      const timeval patience{.tv_sec = 0, .tv_usec = 100'000};
      ::setsockopt(connection, SOL_SOCKET, SO_RCVTIMEO, &patience, sizeof patience);
      bool is_open = true;
      while (is_open && read_request(connection)) {
        const Answer answer = next_answer();
        static_cast<void>(::send(connection, answer.text.data(), answer.text.size(), MSG_NOSIGNAL));
        is_open = answer.keeps_connection;
      }
      ::shutdown(connection, SHUT_WR);
      ::close(connection);
    }
  }

  struct Answer {
    std::string text;
    bool keeps_connection = false;
  };

  /// Returns whether a whole request has come.
  static bool read_request(int connection) {
    std::string text;
    std::size_t wanted = std::string::npos;
    while (text.size() < wanted) {
      char buffer[4096];
      const ssize_t nbytes = ::recv(connection, buffer, sizeof buffer, 0);
      if (nbytes <= 0) return false;
      text.append(buffer, static_cast<std::size_t>(nbytes));
      const std::size_t head = text.find("\r\n\r\n");
      if (head == std::string::npos || wanted != std::string::npos) continue;
      const std::size_t length = text.find("Content-Length: ");
      const bool has_body = length < head;
      wanted = head + 4 + (has_body ? std::strtoul(text.c_str() + length + 16, nullptr, 10) : 0);
    }
    return true;
  }

  Answer next_answer() {
    const std::scoped_lock lock(mutex_);
    std::string parts = "404\n\n";
    if (!answers_.empty()) {
      parts = std::move(answers_.back());
      answers_.pop_back();
    }
    const std::size_t head_end = std::min(parts.find("\n\n"), parts.size());
    const std::string body = parts.substr(std::min(head_end + 2, parts.size()));
    const std::string head = parts.substr(0, head_end);
    const std::string line = "HTTP/1.1 " + head + "\n";
    if (head.find("ength") != std::string::npos) {
      return {.text = line + "Connection: close\n\n" + body};
    }
    return {.text = line + "Content-Length: " + std::to_string(body.size()) + "\n\n" + body,
            .keeps_connection = true};
  }

  int listener_;
  std::mutex mutex_;
  std::vector<std::string> answers_;  // the next one last
};

Proxy& proxy() {
  static auto& proxy = *new Proxy;  // never destroyed: its thread runs until the process ends
  static const bool is_set = [] {
    ::setenv("AWS_MAX_ATTEMPTS", "1", 1);  // no waits
    ::setenv("HF_ENDPOINT", "http://hub.test", 1);
    return true;
  }();
  static_cast<void>(is_set);
  return proxy;
}

void list(object_store::Server& server, const std::string& url) {
  const auto entries = server.list(url);
  if (!entries) return;
  for (const object_store::Entry& entry : *entries) {
    if (!object_store::is_entry_name(entry.name)) std::abort();  // could lead out of the folder
  }
}

/// Finds an object, and reads its first and its last bytes.
void read(object_store::Server& server, const std::string& url) {
  const auto found = server.find(url);
  if (!found) return;
  const std::uint64_t nbytes = found->version.nbytes;
  if (found->begin.size() > nbytes) std::abort();
  std::vector<std::byte> out(static_cast<std::size_t>(std::min<std::uint64_t>(nbytes, 100)));
  if (out.empty()) return;
  server.read(url, found->version, 0, out);
  server.read(url, found->version, nbytes - out.size(), out);
}

void upload(object_store::S3Server& server, const std::string& url) {
  object_store::S3Uploads uploads(server);
  const std::vector<std::byte> bytes(100);
  const object_store::MultipartUpload begun = uploads.begin(url);
  std::vector<object_store::UploadedPart> parts{uploads.put_part(url, begun, 1, bytes)};
  for (const object_store::UploadedPart& part : uploads.list_parts(url, begun.id).parts) {
    if (part.number < 1 || part.number > 10'000) std::abort();
  }
  uploads.complete(url, begun, parts, object_store::Existing::refuse);
}

void use(char choice) {
  object_store::S3Server s3({.credentials = object_store::Credentials{"id", "secret"},
                             .region = "us-east-1",
                             .endpoint = "http://store.test"});
  object_store::S3Uploads uploads(s3);
  object_store::HubServer hub;
  object_store::HttpServer http;
  switch (choice) {
    case 'l':
      return list(s3, "s3://bucket/runs");
    case 'r':
      return read(s3, "s3://bucket/runs/model.pt");
    case 'f':
      static_cast<void>(uploads.list_unfinished("s3://bucket/runs"));
      return;
    case 'p':
      uploads.put("s3://bucket/a", std::vector<std::byte>(7), object_store::Existing::refuse);
      return;
    case 'u':
      return upload(s3, "s3://bucket/a");
    case 'h':
      return list(hub, "hf://owner/name");
    case 'g':
      return read(hub, "hf://owner/name/a");
    default:
      return read(http, "http://web.test/model.pt");
  }
}

}  // namespace

/// The first byte chooses what to ask, the rest is what the servers answer.
extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t nbytes) {
  if (nbytes == 0) return 0;
  proxy().set_answers({reinterpret_cast<const char*>(data) + 1, nbytes - 1});
  try {
    use(static_cast<char>(data[0]));
  } catch (const Error&) {
  }
  return 0;
}
