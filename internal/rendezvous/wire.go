// This file owns the messages between a rank and the service: a length, and JSON behind it.

package rendezvous

import (
	"encoding/binary"
	"encoding/json"
	"fmt"
	"io"
	"time"
)

// magic begins a connection. Whatever does not send it is dropped.
const magic = "STOWAGE1"

const (
	// MaxValue is the most bytes that a value can have.
	MaxValue = 64 << 10
	maxFrame = 4 << 20 // the states of all ranks at most
	maxHello = 8 << 10 // before a connection has said who it is
	// mostReason is the most bytes of a reason to give up. JSON makes at most six of one, and rank 0 reads 2*MaxValue of a message.
	mostReason = MaxValue / 4
)

// kind says what a message is.
type kind int

const (
	hello     kind = iota // a rank says who it is, and the service greets it
	refused               // the service wants no more of this connection
	complete              // all ranks have come
	heartbeat             // in both directions, with the current collective
	setKey                // a rank sets a key; there is an answer
	getKey                // a rank wants a key; the answer comes once it is set
	peekKey               // the answer says whether a key is set, and to what
	barrier               // the answer comes once all ranks are there
	askClock              // the answer has the time of rank 0
	askStates             // the answer has what all ranks do
	answer                // the service answers a request
	abort                 // a rank gives up
	goodbye               // a rank leaves; there is an answer
	failureOf             // a rank has failed
)

// message is one message. A kind uses the fields that it needs.
type message struct {
	Kind    kind     `json:"kind"`
	ID      uint64   `json:"id,omitempty"` // of a request and its answer
	Key     string   `json:"key,omitempty"`
	Value   []byte   `json:"value,omitempty"`
	Set     bool     `json:"set,omitempty"`
	Text    string   `json:"text,omitempty"`
	Time    int64    `json:"time,omitempty"`
	State   State    `json:"state,omitzero"`
	Token   string   `json:"token,omitempty"`
	Version string   `json:"version,omitempty"`
	Digest  string   `json:"digest,omitempty"`
	Size    int      `json:"size,omitempty"`
	Hosts   []string `json:"hosts,omitempty"`
	Failure *Failure `json:"failure,omitempty"`
	States  []State  `json:"states,omitempty"`
}

// writeMessage writes a message in one piece.
func writeMessage(w io.Writer, m *message) error {
	body, err := json.Marshal(m)
	if err != nil {
		return err
	}
	_, err = w.Write(append(binary.BigEndian.AppendUint32(nil, uint32(len(body))), body...))
	return err
}

// readMessage reads a message of at most limit bytes.
func readMessage(r io.Reader, limit int) (*message, error) {
	var head [4]byte
	if _, err := io.ReadFull(r, head[:]); err != nil {
		return nil, err
	}
	n := binary.BigEndian.Uint32(head[:])
	if int64(n) > int64(limit) {
		return nil, fmt.Errorf("a message of %d bytes is longer than %d", n, limit)
	}
	body := make([]byte, n)
	if _, err := io.ReadFull(r, body); err != nil {
		return nil, err
	}
	m := new(message)
	return m, json.Unmarshal(body, m)
}

// beatEvery returns how often ranks say that they are alive: so often that a silent one is
// found in time, and so seldom that thousands are no burden.
func beatEvery(size int, patience time.Duration) time.Duration {
	return min(max(200*time.Millisecond, time.Duration(size)*time.Millisecond), patience/5)
}
