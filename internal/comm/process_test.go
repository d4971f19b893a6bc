// This file owns the tests of how processes agree.

package comm

import (
	"errors"
	"fmt"
	"testing"
)

// Processes have the value of the first one, or the first error in the words of the
// process that has it.
func TestProcessesShare(t *testing.T) {
	x := ofTest(t, 3, 1, Options{})
	err := Run(x.comms, func(c Comm) error {
		p := &Process{Ranks: []int{c.Rank()}, Control: c}
		v := map[string]int{"rank": c.Rank()}
		if err := p.Share(&v, nil); err != nil || v["rank"] != 0 || len(v) != 1 {
			t.Errorf("rank %d has %v, %v", c.Rank(), v, err)
		}
		if p.Speaks() != (c.Rank() == 0) {
			t.Errorf("rank %d speaks: %v", c.Rank(), p.Speaks())
		}
		p.Describe = func(err error) (string, int) { return "the words for " + err.Error(), 2 }
		var own error
		if c.Rank() > 0 {
			own = fmt.Errorf("rank %d: %w", c.Rank(), errBroken)
		}
		err := p.Share(&v, own)
		var told *Told
		switch {
		case c.Rank() == 1 && err != own:
			t.Errorf("rank 1 has %v", err)
		case c.Rank() != 1 && (!errors.As(err, &told) || *told != Told{1, "the words for rank 1: the disk is full", 2}):
			t.Errorf("rank %d has %v", c.Rank(), err)
		}
		if n, err := p.Most(-c.Rank()); n != 0 || err != nil {
			t.Error(n, err)
		}
		if c.Rank() == 2 {
			return errBroken
		}
		if _, err := p.Most(1); !errors.Is(err, errBroken) {
			t.Errorf("rank %d: %v", c.Rank(), err)
		}
		if err := p.Share(nil, nil); !errors.Is(err, errBroken) {
			t.Errorf("rank %d: %v", c.Rank(), err)
		}
		return nil
	})
	wantError(t, err, "rank 2: the disk is full")
	var alone *Process
	if n, err := alone.Most(3); n != 3 || err != nil || !alone.Speaks() || alone.Share(nil, errBroken) != errBroken {
		t.Error("a program without processes does not agree with itself")
	}
}

// scripted is a control that hears what it was told.
type scripted struct {
	Comm
	rank  int
	heard []string
	err   error
	said  string
}

func (c *scripted) Rank() int { return c.rank }

func (c *scripted) Gather(b []byte) (all [][]byte, err error) {
	c.said = string(b)
	for _, s := range c.heard {
		all = append(all, []byte(s))
	}
	return all, c.err
}

// What a process says and what it makes of what others say: without words of its own for an
// error it gives the error's, only the first says its value, and nonsense names who said it.
func TestWhatProcessesSay(t *testing.T) {
	v := 5
	for i, x := range []struct {
		rank  int
		v     any
		own   error
		heard []string
		err   error
		said  string
		want  string
		value int
	}{
		{0, &v, nil, []string{`{"value":5}`, `{}`}, nil, `{"value":5}`, "<nil>", 5},
		{1, &v, nil, []string{`{"value":7}`, `{}`}, nil, `{}`, "<nil>", 7},
		{1, nil, nil, []string{`{"value":7}`, `{}`}, nil, `{}`, "<nil>", 5},
		{1, &v, errBroken, []string{`{"value":7}`, `{"err":{}}`}, nil, `{"err":{"Process":1,"Text":"the disk is full","Code":1}}`, "the disk is full", 5},
		{1, &v, nil, []string{`{"value":7}`, `{}`, `{"err":{"Text":"gone"}}`}, nil, `{}`, "gone", 5},
		{1, &v, nil, []string{`{}`, `{}`, `x`}, nil, `{}`, "comm: cannot read what process 2 says: invalid character 'x' looking for beginning of value; run the same version of the program everywhere", 5},
		{0, &v, nil, nil, errLate, `{"value":5}`, "too late", 5},
		{0, &v, errBroken, nil, errLate, `{"err":{"Process":0,"Text":"the disk is full","Code":1},"value":5}`, "the disk is full", 5},
		{0, func() {}, nil, nil, nil, ``, "json: unsupported type: func()", 5},
	} {
		v = 5
		c := &scripted{rank: x.rank, heard: x.heard, err: x.err}
		p := &Process{Control: c}
		if err := p.Share(x.v, x.own); fmt.Sprint(err) != x.want || c.said != x.said || v != x.value {
			t.Errorf("%d: says %s, has %d, %v", i, c.said, v, err)
		}
	}
	for _, x := range []struct {
		heard []string
		err   error
		want  int
		ok    bool
	}{{[]string{"3", "4", "9"}, nil, 9, true}, {[]string{"9", "4"}, nil, 9, true}, {[]string{"1"}, nil, 5, true}, {[]string{"x"}, nil, 5, false}, {nil, errLate, 5, false}} {
		if n, err := (&Process{Control: &scripted{heard: x.heard, err: x.err}}).Most(5); n != x.want || (err == nil) != x.ok {
			t.Errorf("%v: %d, %v", x.heard, n, err)
		}
	}
}

var errLate = errors.New("too late")
