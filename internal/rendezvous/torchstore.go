// This file owns a client for the store of torchrun's agent (TCPStore of PyTorch). All
// numbers are little-endian, and texts have eight bytes of length before them.
//
// PyTorch has spoken three dialects. Since 2.2 a client validates itself once with a magic
// number; in 2.1 that number was before each query; earlier there was none.

package rendezvous

import (
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"io"
	"net"
	"strings"
	"time"
)

const torchMagic = 0x3C85F7CE

// Queries as they are numbered since 2.2. Before, VALIDATE was not there, and all numbers
// were one less.
const (
	torchValidate = iota
	torchSet
	_
	torchGet
	_
	_
	torchWait
	torchNumKeys
	torchDelete
)

// dialect is how a version of PyTorch begins a query.
type dialect int

const (
	validated  dialect = iota // 2.2 and later
	everyQuery                // 2.1
	bare                      // 2.0 and earlier
	dialects
)

// begin starts a query.
func (d dialect) begin(query byte) []byte {
	switch d {
	case everyQuery:
		return append(binary.LittleEndian.AppendUint32(nil, torchMagic), query-1)
	case bare:
		return []byte{query - 1}
	}
	return []byte{query}
}

// appendText appends a length and a text.
func appendText(b []byte, text string) []byte {
	return append(binary.LittleEndian.AppendUint64(b, uint64(len(text))), text...)
}

// torchStore is a connection to a store.
type torchStore struct {
	conn    net.Conn
	dialect dialect
}

// quickReply is how long the store may take for the first answer. It answers at once if it
// knows the dialect.
const quickReply = 5 * time.Second

// dialTorchStore connects and finds the dialect by trying.
func dialTorchStore(ctx context.Context, address string) (*torchStore, error) {
	var err error
	for d := validated; d < dialects; d++ {
		var conn net.Conn
		if conn, err = new(net.Dialer).DialContext(ctx, "tcp", address); err != nil {
			return nil, err
		}
		s := &torchStore{conn, d}
		trial, cancel := context.WithTimeout(ctx, quickReply)
		err = s.introduce(trial)
		cancel()
		if err == nil {
			return s, nil
		}
		s.close()
		if ctx.Err() != nil {
			return nil, ctx.Err()
		}
	}
	return nil, fmt.Errorf("it speaks no protocol of PyTorch 1.13 to 2.9 (%w)", err)
}

// introduce asks something that changes nothing. What is sent in the first dialect must not
// harm a store that speaks another. One of 2.0 takes it for a key, and the length of the
// name puts the length of that key beyond any memory, so it hangs up; one of 2.1 reads
// four bytes at a time and answers nothing.
func (s *torchStore) introduce(ctx context.Context) error {
	query := s.dialect.begin(torchNumKeys)
	if s.dialect == validated {
		query = binary.LittleEndian.AppendUint32([]byte{torchValidate}, torchMagic)
		query = appendText(append(query, s.dialect.begin(torchDelete)...), "stowage"+strings.Repeat("-", 512-len("stowage")-2))
	}
	return s.ask(ctx, query, make([]byte, 8))
}

// ask sends a query and reads an answer of a known length.
func (s *torchStore) ask(ctx context.Context, query, reply []byte) error {
	defer context.AfterFunc(ctx, func() { _ = s.conn.SetDeadline(time.Now()) })()
	if _, err := s.conn.Write(query); err != nil {
		return err
	}
	if _, err := io.ReadFull(s.conn, reply); err != nil {
		if ctx.Err() != nil {
			return ctx.Err()
		}
		return err
	}
	return nil
}

// wait waits until a key is set.
func (s *torchStore) wait(ctx context.Context, key string) error {
	query := binary.LittleEndian.AppendUint64(s.dialect.begin(torchWait), 1)
	var reply [1]byte
	if err := s.ask(ctx, appendText(query, key), reply[:]); err != nil {
		return err
	}
	if reply[0] != 0 {
		return errors.New("the store gave up waiting")
	}
	return nil
}

// set sets a key. The store does not answer, so set asks whether the key is there.
func (s *torchStore) set(ctx context.Context, key string, value []byte) error {
	query := appendText(appendText(s.dialect.begin(torchSet), key), string(value))
	if err := s.ask(ctx, query, nil); err != nil {
		return err
	}
	return s.wait(ctx, key)
}

// get returns the value of a key. It waits until it is set.
func (s *torchStore) get(ctx context.Context, key string) ([]byte, error) {
	if err := s.wait(ctx, key); err != nil {
		return nil, err
	}
	var size [8]byte
	if err := s.ask(ctx, appendText(s.dialect.begin(torchGet), key), size[:]); err != nil {
		return nil, err
	}
	n := binary.LittleEndian.Uint64(size[:])
	if n > MaxValue {
		return nil, fmt.Errorf("the store has a value of %d bytes, more than %d", n, MaxValue)
	}
	value := make([]byte, n)
	return value, s.ask(ctx, nil, value)
}

func (s *torchStore) close() { _ = s.conn.Close() }
