// This file owns how ranks find the service of rank 0.

package rendezvous

import (
	"bytes"
	"context"
	"encoding/hex"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net"
	"os"
	"strconv"
	"syscall"
	"time"

	"github.com/stowage-dev/stowage/internal/launcher"
)

// invitation is what rank 0 lets the others know if they do not know an address before.
type invitation struct {
	Token     string   `json:"token"`
	Host      string   `json:"host"`
	Port      string   `json:"port"`
	Addresses []string `json:"addresses"` // of the machine
}

// meeting is where ranks meet.
type meeting struct {
	listener net.Listener                               // of rank 0
	token    string                                     // of rank 0
	invited  func(context.Context) (*invitation, error) // asked at each attempt, because an earlier start may have left one
	close    func()
}

// newMeeting finds out where ranks meet. Rank 0 listens there.
func newMeeting(ctx context.Context, place *launcher.Place, opts Options) (*meeting, error) {
	switch {
	case opts.Exchange != nil:
		return exchanged(place, opts)
	case place.AgentStore:
		return throughAgent(ctx, place)
	}
	return atLeader(place)
}

// atLeader meets at an address that all ranks know.
func atLeader(place *launcher.Place) (*meeting, error) {
	address, err := place.Address()
	if err != nil {
		return nil, err
	}
	host, port, err := net.SplitHostPort(address)
	if err != nil {
		return nil, err
	}
	in := &invitation{Token: fmt.Sprintf("%s/%d", place.Job, place.Restart), Port: port, Addresses: []string{host}}
	m := &meeting{token: in.Token, invited: func(context.Context) (*invitation, error) { return in, nil }, close: func() {}}
	if place.Rank == 0 {
		bind := ""
		if ip := net.ParseIP(host); host == "localhost" || ip != nil && ip.IsLoopback() {
			bind = host
		}
		if m.listener, err = net.Listen("tcp", net.JoinHostPort(bind, port)); err != nil {
			return nil, fmt.Errorf("rank 0 on %s cannot listen on port %s: %w; set STOWAGE_PORT to a free port on all ranks", place.Host, port, plain(err))
		}
	}
	return m, nil
}

// plain returns what an error of the network is about, without the calls that had it.
func plain(err error) error {
	var no syscall.Errno
	switch {
	case nameless(err):
		return errors.New("there is no such host")
	case errors.As(err, &no):
		return no
	}
	return err
}

// nameless reports whether the name of a host is not known. It may become known, as names of pods do, and is more often
// mistyped, so the user hears of it at once.
func nameless(err error) bool {
	var name *net.DNSError
	return errors.As(err, &name) && name.IsNotFound
}

// maxAddresses bounds an invitation: machines with many networks of containers have hundreds
// of addresses, and a rank that cannot come tries them all.
const maxAddresses = 16

// open listens on any port and returns the invitation.
func open(place *launcher.Place) (net.Listener, *invitation, error) {
	listener, err := net.Listen("tcp", ":0")
	if err != nil {
		return nil, nil, fmt.Errorf("rank 0 on %s cannot listen: %w", place.Host, plain(err))
	}
	token, err := newToken()
	if err != nil {
		return nil, nil, errors.Join(fmt.Errorf("rank 0 on %s cannot make a secret: %w", place.Host, plain(err)), listener.Close())
	}
	in := &invitation{Token: token, Host: place.Host, Port: strconv.Itoa(listener.Addr().(*net.TCPAddr).Port)}
	in.Addresses = append(in.Addresses, place.Host)
	addresses, _ := net.InterfaceAddrs()
	for _, a := range addresses {
		if ip, ok := a.(*net.IPNet); ok && ip.IP.IsGlobalUnicast() && len(in.Addresses) < maxAddresses {
			in.Addresses = append(in.Addresses, ip.IP.String())
		}
	}
	return listener, in, nil
}

// newToken returns a secret of 128 bits from the system's generator. Package crypto/rand, which
// asks the same one, would take a second of the time that the program takes to build.
func newToken() (string, error) {
	f, err := os.Open("/dev/urandom")
	if err != nil {
		return "", err
	}
	defer f.Close()
	secret := make([]byte, 16)
	_, err = io.ReadFull(f, secret)
	return hex.EncodeToString(secret), err
}

// late tells that rank 0 has not said where it is, unless the function that it returns is
// called within Patience. That function reports whether it was told.
func (o Options) late(place *launcher.Place) func() bool {
	if o.Waits == nil || place.Rank == 0 {
		return func() bool { return false }
	}
	told := make(chan struct{})
	t := time.AfterFunc(o.Patience, func() {
		defer close(told)
		o.Waits(fmt.Sprintf("rank %d on %s waits for rank 0, which has not said yet where it is", place.Rank, place.Host))
	})
	return func() bool {
		if t.Stop() {
			return false
		}
		<-told
		return true
	}
}

// exchanged meets at an address that rank 0 sends by the caller's broadcast.
func exchanged(place *launcher.Place, opts Options) (*meeting, error) {
	m := &meeting{close: func() {}}
	text := ""
	if place.Rank == 0 {
		listener, in, err := open(place)
		if err != nil {
			return nil, err
		}
		b, err := json.Marshal(in)
		if err != nil {
			return nil, err
		}
		m.listener, m.token, text = listener, in.Token, string(b)
	}
	settled := opts.late(place)
	text, err := opts.Exchange(text)
	settled()
	in := new(invitation)
	if err == nil {
		err = json.Unmarshal([]byte(text), in)
	}
	if err != nil {
		if m.listener != nil {
			_ = m.listener.Close()
		}
		return nil, fmt.Errorf("rank %d on %s did not get the address of rank 0: %w", place.Rank, place.Host, err)
	}
	m.invited = func(context.Context) (*invitation, error) { return in, nil }
	return m, nil
}

// throughAgent meets at an address that rank 0 leaves in the store of torchrun's agent.
func throughAgent(ctx context.Context, place *launcher.Place) (*meeting, error) {
	address, err := place.Address()
	if err != nil {
		return nil, err
	}
	store, err := dialTorchStore(ctx, address)
	if err != nil {
		return nil, fmt.Errorf("rank %d on %s cannot use the store of torchrun's agent at %s: %w; set STOWAGE_PORT to a free port of that host on all ranks", place.Rank, place.Host, address, err)
	}
	key := fmt.Sprintf("stowage/%s/%d", place.Job, place.Restart)
	m := &meeting{close: store.close}
	m.invited = func(ctx context.Context) (*invitation, error) {
		b, err := store.get(ctx, key)
		if err != nil {
			return nil, fmt.Errorf("torchrun's agent at %s: %w", address, err)
		}
		in := new(invitation)
		return in, json.NewDecoder(bytes.NewReader(b)).Decode(in)
	}
	if place.Rank == 0 {
		listener, in, err := open(place)
		if err == nil {
			var b []byte
			if b, err = json.Marshal(in); err == nil {
				err = store.set(ctx, key, b)
			}
			m.listener, m.token = listener, in.Token
		}
		if err != nil {
			if listener != nil {
				_ = listener.Close()
			}
			store.close()
			return nil, err
		}
	}
	return m, nil
}

// refusal is the service's word that a rank cannot come. Trying again does not help.
type refusal string

func (r refusal) Error() string { return string(r) }

// connect joins the service, as soon as it is there.
func (m *meeting) connect(ctx context.Context, place *launcher.Place, opts Options) (*Session, error) {
	var last error
	address, began, told := "rank 0", time.Now(), opts.Waits == nil
	for wait := 20 * time.Millisecond; ; wait = min(2*wait, time.Second) {
		settled := func() bool { return false }
		if !told {
			settled = opts.late(place)
		}
		in, err := m.invited(ctx)
		told = settled() || told
		if err == nil {
			for _, host := range in.from(place) {
				address = net.JoinHostPort(host, in.Port)
				s, err := greet(ctx, address, in.Token, place, opts)
				var no refusal
				if err == nil || errors.As(err, &no) {
					return s, err
				}
				if ctx.Err() == nil {
					last = err
				}
			}
		} else if ctx.Err() == nil {
			return nil, err
		}
		if last != nil && !told && (nameless(last) || time.Since(began) >= opts.Patience) {
			told = true
			opts.Waits(fmt.Sprintf("rank %d on %s waits for rank 0 at %s: %v", place.Rank, place.Host, address, plain(last)))
		}
		select {
		case <-ctx.Done():
			if last == nil {
				last = ctx.Err()
			}
			return nil, fmt.Errorf("rank %d on %s cannot reach rank 0 at %s: %w; see that rank 0 was started and that its port is open, or set STOWAGE_PORT to one that is", place.Rank, place.Host, address, plain(last))
		case <-time.After(wait):
		}
	}
}

// from returns the addresses to try. Ranks of the same machine need no network.
func (in *invitation) from(place *launcher.Place) []string {
	if in.Host == place.Host {
		return append([]string{"127.0.0.1", "::1"}, in.Addresses...)
	}
	return in.Addresses
}

// greet connects to an address and says who this rank is.
func greet(ctx context.Context, address, token string, place *launcher.Place, opts Options) (*Session, error) {
	ctx, cancel := context.WithTimeout(ctx, opts.Patience)
	defer cancel()
	conn, err := new(net.Dialer).DialContext(ctx, "tcp", address)
	if err != nil {
		return nil, err
	}
	defer context.AfterFunc(ctx, func() { _ = conn.SetDeadline(time.Now()) })()
	var reply *message
	if _, err = conn.Write([]byte(magic)); err == nil {
		err = writeMessage(conn, &message{
			Kind: hello, Token: token, Version: opts.Version, Digest: opts.Digest, Size: place.Size,
			State: State{Rank: place.Rank, Host: place.Host},
		})
	}
	if err == nil {
		reply, err = readMessage(conn, maxHello)
	}
	switch {
	case err != nil:
		err = fmt.Errorf("what listens there does not know this job: %w", err)
	case reply.Kind == refused:
		err = refusal(reply.Text)
	case reply.Kind != hello:
		err = errors.New("what listens there does not know this job")
	default:
		return newSession(conn, reply.State.Host, place, opts), nil
	}
	_ = conn.Close()
	return nil, err
}
