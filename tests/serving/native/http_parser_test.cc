// The HTTP/1.1 reader of the model server is strict, and no cut of a stream changes what it reads.
#include "monolith/serving/native/rest/http_parser.h"

#include <gtest/gtest.h>

#include <random>
#include <string>
#include <string_view>
#include <vector>

namespace monolith {
namespace serving {
namespace {

using Result = HttpParser::Result;

Result Parse(HttpParser* parser, const std::string& text) {
  size_t taken = 0;
  return parser->Parse(text, &taken);
}

int Refusal(const std::string& text) {
  HttpParser parser(1000, 5000);
  EXPECT_EQ(Parse(&parser, text), Result::kRefused) << text;
  EXPECT_FALSE(parser.reason().empty()) << text;
  return parser.refusal();
}

TEST(HttpParserTest, ReadsPipelinedRequestsInPiecesOfAnySize) {
  const std::string text =
      "\r\nPOST /v1/models/a%3Ab:predict?x=1 HTTP/1.1\r\nHost: h\r\ncontent-length:  5 "
      "\r\n\r\nhello"
      "GET /x HTTP/1.1\r\nhost:\r\nConnection: Upgrade\r\nUpgrade: h2c\r\n\r\n"
      "POST /y HTTP/1.1\r\nHost: h\r\nTransfer-Encoding: chunked\r\nConnection: close\r\n\r\n"
      "3;ext\r\nabc\r\nA\r\n0123456789\r\n0\r\nTrailer: t\r\n\r\n";
  for (size_t piece = 1; piece <= text.size(); ++piece) {
    HttpParser parser(1000, 5000);
    std::vector<HttpRequest> requests;
    for (size_t start = 0; start < text.size(); start += piece) {
      std::string_view input = std::string_view(text).substr(start, piece);
      while (!input.empty()) {
        size_t taken = 0;
        const Result result = parser.Parse(input, &taken);
        ASSERT_NE(result, Result::kRefused) << parser.reason();
        ASSERT_GT(taken, 0u);
        if (result == Result::kComplete) requests.push_back(parser.Take());
        input.remove_prefix(taken);
      }
    }
    ASSERT_EQ(requests.size(), 3u);
    EXPECT_EQ(requests[0].method, "POST");
    EXPECT_EQ(requests[0].path, "/v1/models/a:b:predict");
    EXPECT_EQ(requests[0].body, "hello");
    EXPECT_TRUE(requests[0].keep_alive);
    EXPECT_EQ(requests[1].path, "/x");
    EXPECT_TRUE(requests[1].keep_alive);
    EXPECT_EQ(requests[2].body, "abc0123456789");
    EXPECT_FALSE(requests[2].keep_alive);
  }
}

TEST(HttpParserTest, ARequestOfHttp10IsTheLastOne) {
  HttpParser parser(1000, 5000);

  ASSERT_EQ(Parse(&parser, "GET /x HTTP/1.0\r\nConnection: keep-alive\r\n\r\n"), Result::kComplete);

  EXPECT_FALSE(parser.Take().keep_alive);
}

TEST(HttpParserTest, RefusesWhatIsAmbiguousOrTooLarge) {
  const std::string post = "POST / HTTP/1.1\r\nHost: h\r\n";
  const std::string chunked = post + "Transfer-Encoding: chunked\r\n\r\n";
  EXPECT_EQ(Refusal("GET /\r\n\r\n"), 400);
  EXPECT_EQ(Refusal("GET x HTTP/1.1\r\nHost: h\r\n\r\n"), 400);
  EXPECT_EQ(Refusal("GET / HTTP/2.0\r\nHost: h\r\n\r\n"), 505);
  EXPECT_EQ(Refusal("G@T / HTTP/1.1\r\nHost: h\r\n\r\n"), 400);
  EXPECT_EQ(Refusal("GET /%zz HTTP/1.1\r\nHost: h\r\n\r\n"), 400);
  EXPECT_EQ(Refusal("GET /%4 HTTP/1.1\r\nHost: h\r\n\r\n"), 400);
  EXPECT_EQ(Refusal("GET / HTTP/1.1\r\nHost: h\r\n folded: x\r\n\r\n"), 400);
  EXPECT_EQ(Refusal("GET / HTTP/1.1\r\nHost: h\r\nno name\r\n\r\n"), 400);
  // To llhttp a bare line feed is a part of the version.
  EXPECT_EQ(Refusal("GET / HTTP/1.1\nHost: h\n\n"), 505);
  EXPECT_EQ(Refusal("GET / HTTP/1.1\r\n\r\n"), 400);
  EXPECT_EQ(Refusal("GET / HTTP/1.1\r\nHost: a\r\nHost: b\r\n\r\n"), 400);
  EXPECT_EQ(Refusal("CONNECT h:1 HTTP/1.1\r\nHost: h\r\n\r\n"), 400);
  EXPECT_EQ(Refusal(post + "Content-Length: 1\r\nContent-Length: 1\r\n\r\n"), 400);
  EXPECT_EQ(Refusal(post + "Content-Length: -1\r\n\r\n"), 400);
  EXPECT_EQ(Refusal(post + "Content-Length: 99999999999999999999\r\n\r\n"), 400);
  EXPECT_EQ(Refusal(post + "Content-Length: 1\r\nTransfer-Encoding: chunked\r\n\r\n"), 400);
  EXPECT_EQ(Refusal(post + "Transfer-Encoding: gzip\r\n\r\n"), 501);
  EXPECT_EQ(Refusal(post + "Transfer-Encoding: gzip, chunked\r\n\r\n"), 501);
  EXPECT_EQ(Refusal(post + "Content-Encoding: gzip\r\n\r\n"), 415);
  EXPECT_EQ(Refusal(post + "Content-Length: 5001\r\n\r\n"), 413);
  EXPECT_EQ(Refusal(chunked + "1389\r\n"), 413);
  EXPECT_EQ(Refusal(chunked + "FFFFFFFFFFFFFFF0\r\n"), 413);
  EXPECT_EQ(Refusal(chunked + "2\r\nabc\r\n"), 400);
  EXPECT_EQ(Refusal(chunked + "-2\r\n"), 400);
  EXPECT_EQ(Refusal("GET / HTTP/1.1\r\nx: " + std::string(2000, 'x')), 431);
  EXPECT_EQ(Refusal("GET / HTTP/1.1\r\nx: " + std::string(3000, ' ')), 431);
}

TEST(HttpParserTest, RefusesWhatBringsNothing) {
  std::string lines;
  for (int i = 0; i < 100; ++i) lines += "\r\n";
  EXPECT_EQ(Refusal(lines), 400);

  const std::string chunked = "POST / HTTP/1.1\r\nHost: h\r\nTransfer-Encoding: chunked\r\n\r\n";
  HttpParser parser(1000, 1 << 30);
  Result result = Parse(&parser, chunked);
  int chunks = 0;
  for (; chunks < 1'000'000 && result == Result::kNeedsMore; ++chunks) {
    result = Parse(&parser, "1\r\nx\r\n");
  }
  EXPECT_EQ(parser.refusal(), 400);
  EXPECT_LT(chunks, 50'000);
  EXPECT_EQ(Refusal(chunked + "1;" + std::string(100'000, 'x')), 400);
  EXPECT_EQ(Refusal(chunked + "0\r\nx: " + std::string(100'000, 'x')), 400);
}

TEST(HttpParserTest, TellsOfAnExpectationOnce) {
  HttpParser parser(1000, 5000);

  EXPECT_EQ(Parse(&parser,
                  "POST / HTTP/1.1\r\nHost: h\r\nExpect: 100-continue\r\n"
                  "Content-Length: 1\r\n\r\n"),
            Result::kNeedsMore);

  EXPECT_TRUE(parser.TakeExpectation());
  EXPECT_FALSE(parser.TakeExpectation());
}

TEST(HttpParserTest, SurvivesAnything) {
  const std::string valid =
      "POST /v1/models/m:predict HTTP/1.1\r\nHost: h\r\nTransfer-Encoding: "
      "chunked\r\nContent-Type: a\r\n\r\n"
      "3\r\nabc\r\n0\r\n\r\nPOST / HTTP/1.1\r\nHost: h\r\nContent-Length: 3\r\n\r\nabc";
  std::mt19937 random(3);
  for (int i = 0; i < 20'000; ++i) {
    std::string text = valid;
    for (uint32_t changes = random() % 4 + 1; changes > 0; --changes) {
      const size_t place = random() % text.size();
      if (random() % 2 == 0) {
        text[place] = static_cast<char>(random());
      } else {
        text.erase(place, random() % 5);
      }
      if (text.empty()) text = "G";
    }
    HttpParser parser(1000, 5000);
    std::string_view input = text;
    size_t taken = 0;
    while (parser.Parse(input, &taken) == Result::kComplete) {
      parser.Take();
      input.remove_prefix(taken);
    }
  }
}

}  // namespace
}  // namespace serving
}  // namespace monolith
