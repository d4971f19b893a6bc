// This file owns answers: their heads, and how they are sent.

package web

import (
	"fmt"
	"io"
	"net"
	"slices"
	"time"
)

// pieceSize is the size of the pieces in which answers are sent.
const pieceSize = 256 << 10

// The statuses that the server itself answers with.
const (
	badRequest, headTooLarge, wrongVersion = 400, 431, 505
)

// reasons has the words for the statuses that answers have.
var reasons = map[int]string{
	200: "OK", badRequest: "Bad Request", 404: "Not Found", 405: "Method Not Allowed", 421: "Misdirected Request",
	headTooLarge: "Request Header Fields Too Large", 500: "Internal Server Error", 503: "Service Unavailable", wrongVersion: "HTTP Version Not Supported",
}

// Answer is the answer to a request. A handler sets headers, and then calls Send, Refuse or
// Stream once.
type Answer struct {
	conn    net.Conn
	in      io.Reader // what the viewer sends behind its request
	request *Request
	header  []byte
	sent    bool
	gone    chan struct{} // nil unless it is a stream
}

// Set adds a header.
func (a *Answer) Set(name, value string) { a.header = fmt.Appendf(a.header, "%s: %s\r\n", name, value) }

// Send sends an answer as a whole. Kind is the type of its content. The answer to HEAD has
// no body, and no length if the body is empty: that of a stream has none.
func (a *Answer) Send(status int, kind string, body []byte) error {
	head := a.request.Method == "HEAD"
	a.Set("Content-Type", kind)
	if !head || len(body) > 0 {
		a.Set("Content-Length", fmt.Sprint(len(body)))
	}
	if !a.request.keep {
		a.Set("Connection", "close")
	}
	if head {
		body = nil
	}
	return a.write(a.head(status), body)
}

// Refuse sends a sentence instead of what was asked for.
func (a *Answer) Refuse(status int, sentence string) {
	_ = a.Send(status, "text/plain; charset=utf-8", []byte(sentence+"\n")) // a viewer that is gone does not miss it
}

// Stream begins an answer that has no known end. Call Say for each part of it.
func (a *Answer) Stream(kind string) error {
	a.Set("Content-Type", kind)
	a.Set("Connection", "close")
	a.request.keep, a.request.unread = false, false // all that follows is read here
	a.gone = make(chan struct{})
	_ = a.conn.SetReadDeadline(time.Time{}) // all our connections have deadlines
	go func() {
		defer close(a.gone)
		// It ends when one side closes the connection. A viewer has nothing to say, so one that
		// says much has no business here.
		_, _ = io.CopyN(io.Discard, a.in, mostUnread)
	}()
	return a.write(a.head(200))
}

// Say sends a part of a stream.
func (a *Answer) Say(text string) error { return a.write([]byte(text)) }

// Gone returns a channel that is closed when the viewer of a stream is gone.
func (a *Answer) Gone() <-chan struct{} { return a.gone }

// head returns the head of the answer.
func (a *Answer) head(status int) []byte {
	a.sent = true
	first := fmt.Appendf(nil, "HTTP/1.1 %d %s\r\nDate: %s\r\n", status, reasons[status], time.Now().UTC().Format("Mon, 02 Jan 2006 15:04:05 GMT"))
	return append(append(first, a.header...), "\r\n"...)
}

// write sends bytes. The viewer has WriteLimit to take each piece of them.
func (a *Answer) write(parts ...[]byte) error {
	for piece := range slices.Chunk(slices.Concat(parts...), pieceSize) {
		_ = a.conn.SetWriteDeadline(time.Now().Add(WriteLimit)) // all our connections have deadlines
		if _, err := a.conn.Write(piece); err != nil {
			a.request.keep = false // what would follow has no beginning
			return err
		}
	}
	return nil
}
