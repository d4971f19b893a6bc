// This file owns the tests of the format: bytes written by hand, round trips,
// every way a file can be wrong, and fuzzing.

package safetensors

import (
	"bytes"
	"encoding/binary"
	"errors"
	"fmt"
	"io"
	"math"
	"reflect"
	"strings"
	"testing"

	"pgregory.net/rapid"
)

// raw is a file with that header as it stands.
func raw(header string, data string) []byte {
	b := binary.LittleEndian.AppendUint64(nil, uint64(len(header)))
	return append(append(b, header...), data...)
}

func open(b []byte) (*Reader, error) { return NewReader(bytes.NewReader(b), int64(len(b))) }

// write puts the same byte pattern into every tensor, in pieces.
func write(t rapid.TB, meta map[string]string, tensors []Tensor, data []byte, piece int) []byte {
	t.Helper()
	var out bytes.Buffer
	l := NewLayout(meta, tensors)
	w, err := NewWriter(&out, l)
	if err != nil {
		t.Fatal(err)
	}
	for _, tensor := range tensors {
		own := data[:tensor.Bytes()]
		data = data[len(own):]
		for len(own) > 0 {
			n := min(piece, len(own))
			if err := w.Write(tensor.Name, own[:n]); err != nil {
				t.Fatal(err)
			}
			own = own[n:]
		}
	}
	w.Close()
	if int64(out.Len()) != l.Size() {
		t.Fatalf("the file has %d bytes, the layout says %d", out.Len(), l.Size())
	}
	return out.Bytes()
}

// The bytes are those of the format's description, laid out by hand.
func TestWriteByHand(t *testing.T) {
	got := write(t, map[string]string{"format": "pt"}, []Tensor{
		{"layers.3.mlp.experts.linear_fc1.weight", BF16, []int{2, 2}},
		{"step", I64, nil},
	}, []byte("aabbccdd--------"), 3)
	header := `{"__metadata__":{"format":"pt"},` +
		`"layers.3.mlp.experts.linear_fc1.weight":{"dtype":"BF16","shape":[2,2],"data_offsets":[0,8]},` +
		`"step":{"dtype":"I64","shape":[],"data_offsets":[8,16]}}`
	for len(header)%8 != 0 {
		header += " "
	}
	if want := raw(header, "aabbccdd--------"); !bytes.Equal(got, want) {
		t.Errorf("got %q\nwant %q", got, want)
	}
}

// Other writers order their keys, pad and space as they like.
func TestReadByHand(t *testing.T) {
	r, err := open(raw("{\n \"b\" : {\"data_offsets\":[4,4],\"shape\":[3,0],\"dtype\":\"F32\"},"+
		"\"a\\u0062\":{\"shape\":[4],\"dtype\":\"U8\",\"data_offsets\":[0,4]}, \"__metadata__\":{\"x\":\"y\"}}  \n", "wxyz"))
	if err != nil {
		t.Fatal(err)
	}
	if want := []Tensor{{"ab", U8, []int{4}}, {"b", F32, []int{3, 0}}}; !reflect.DeepEqual(r.Tensors(), want) {
		t.Errorf("tensors are %v, want %v", r.Tensors(), want)
	}
	if !reflect.DeepEqual(r.Metadata(), map[string]string{"x": "y"}) {
		t.Errorf("metadata are %v", r.Metadata())
	}
	p := make([]byte, 2)
	if err := r.ReadAt("ab", p, 1); err != nil || string(p) != "xy" {
		t.Errorf("bytes 1 to 3 are %q, %v", p, err)
	}
	if _, ok := r.Tensor("c"); ok {
		t.Error("found a tensor that is not there")
	}
}

func TestDamaged(t *testing.T) {
	const a = `{"dtype":"U8","shape":[2],"data_offsets":[0,2]}`
	for name, c := range map[string]struct {
		header, data, want string
	}{
		"empty header":       {``, "", "begin with {"},
		"space first":        {` {"a":` + a + `}`, "xx", "begin with {"},
		"no object":          {`[]`, "", "begin with {"},
		"cut":                {`{"a":`, "xx", "not JSON"},
		"after the end":      {`{"a":` + a + `}{}`, "xx", "expected the end of the header"},
		"NUL after the end":  {`{"a":` + a + "}\x00", "xx", "expected the end of the header"},
		"not UTF-8":          {"{\"\xff\":" + a + `}`, "xx", "UTF-8"},
		"twice":              {`{"a":` + a + `,"a":` + a + `}`, "xx", `"a" twice`},
		"twice by escape":    {`{"a":` + a + `,"\u0061":` + a + `}`, "xx", `"a" twice`},
		"field twice":        {`{"a":{"dtype":"U8","dtype":"U8","shape":[2],"data_offsets":[0,2]}}`, "xx", `"dtype" twice`},
		"unknown field":      {`{"a":{"dtype":"U8","Shape":[2],"data_offsets":[0,2]}}`, "xx", `"Shape"`},
		"missing field":      {`{"a":{"dtype":"U8","data_offsets":[0,1]}}`, "x", "lacks"},
		"unknown type":       {`{"a":{"dtype":"F7","shape":[2],"data_offsets":[0,2]}}`, "xx", `"F7"`},
		"type is a number":   {`{"a":{"dtype":7,"shape":[2],"data_offsets":[0,2]}}`, "xx", "expected text"},
		"shape is a number":  {`{"a":{"dtype":"U8","shape":2,"data_offsets":[0,2]}}`, "xx", "expected ["},
		"negative dimension": {`{"a":{"dtype":"U8","shape":[-2],"data_offsets":[0,2]}}`, "xx", "whole number"},
		"half a dimension":   {`{"a":{"dtype":"U8","shape":[2.0],"data_offsets":[0,2]}}`, "xx", "whole number"},
		"dimension is null":  {`{"a":{"dtype":"U8","shape":[null],"data_offsets":[0,2]}}`, "xx", "whole number"},
		"huge dimension":     {`{"a":{"dtype":"U8","shape":[9223372036854775808],"data_offsets":[0,2]}}`, "xx", "whole number"},
		"largest dimension":  {`{"a":{"dtype":"U8","shape":[9223372036854775807],"data_offsets":[0,2]}}`, "xx", "do not match the bytes"},
		"overflow":           {`{"a":{"dtype":"U8","shape":[4294967296,4294967296],"data_offsets":[0,0]}}`, "", "do not match the bytes"},
		"overflow by type":   {`{"a":{"dtype":"U64","shape":[2305843009213693952],"data_offsets":[0,0]}}`, "", "do not match the bytes"},
		"three offsets":      {`{"a":{"dtype":"U8","shape":[2],"data_offsets":[0,2,2]}}`, "xx", "got 3"},
		"backwards":          {`{"a":{"dtype":"U8","shape":[0],"data_offsets":[2,0]}}`, "xx", "do not match the bytes"},
		"wrong length":       {`{"a":{"dtype":"F32","shape":[1],"data_offsets":[0,2]}}`, "xx", "do not match the bytes"},
		"overlap":            {`{"a":` + a + `,"b":{"dtype":"U8","shape":[2],"data_offsets":[1,3]}}`, "xxx", "begins at byte 1"},
		"same place":         {`{"a":` + a + `,"b":` + a + `}`, "xx", "begins at byte 0"},
		"hole":               {`{"a":` + a + `,"b":{"dtype":"U8","shape":[1],"data_offsets":[3,4]}}`, "xxxx", "begins at byte 3"},
		"hole at the front":  {`{"b":{"dtype":"U8","shape":[1],"data_offsets":[1,2]}}`, "xx", "begins at byte 1"},
		"data missing":       {`{"a":` + a + `}`, "x", "take 2 bytes"},
		"data left over":     {`{"a":` + a + `}`, "xxx", "take 2 bytes"},
		"metadata no text":   {`{"__metadata__":{"a":1}}`, "", "expected text"},
		"metadata twice":     {`{"__metadata__":{},"__metadata__":{}}`, "", "twice"},
		"metadata key twice": {`{"__metadata__":{"a":"","a":""}}`, "", `"a" twice`},
		"metadata a list":    {`{"__metadata__":[]}`, "", "expected {"},
	} {
		t.Run(name, func(t *testing.T) {
			_, err := open(raw(c.header, c.data))
			if err == nil || !strings.Contains(err.Error(), c.want) {
				t.Errorf("got %v, want words with %q", err, c.want)
			}
		})
	}
}

// A length that is damaged must not become an allocation.
func TestHeaderLength(t *testing.T) {
	for _, n := range []uint64{3, maxHeader + 1, 1 << 63, 1<<64 - 1} {
		b := binary.LittleEndian.AppendUint64(nil, n)
		if _, err := open(append(b, "{}"...)); err == nil || !strings.Contains(err.Error(), "does not fit") {
			t.Errorf("length %d: %v", n, err)
		}
	}
	if _, err := NewReader(bytes.NewReader(binary.LittleEndian.AppendUint64(nil, maxHeader+1)), 1<<40); err == nil || !strings.Contains(err.Error(), "does not fit") {
		t.Errorf("a header above the bound: %v", err)
	}
}

// Not one byte may be missing or added.
func TestTruncated(t *testing.T) {
	b := write(t, nil, []Tensor{{"a", F32, []int{3}}, {"b", U8, []int{5}}}, bytes.Repeat([]byte("z"), 17), 4)
	if _, err := open(b); err != nil {
		t.Fatal(err)
	}
	for n := range b {
		if _, err := open(b[:n]); err == nil {
			t.Errorf("opened with %d bytes of %d", n, len(b))
		}
	}
	if _, err := open(append(b, 0)); err == nil {
		t.Error("opened with a byte too many")
	}
	// The file is shorter than its size was said to be.
	if _, err := NewReader(bytes.NewReader(b[:20]), int64(len(b))); err != io.ErrUnexpectedEOF {
		t.Errorf("a header that ends early: %v", err)
	}
}

func TestRoundTrip(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		names := rapid.SliceOfNDistinct(rapid.StringN(1, 12, -1), 0, 6, rapid.ID).Draw(t, "names")
		var tensors []Tensor
		total := int64(0)
		for _, name := range names {
			tensor := Tensor{
				Name:  name,
				DType: DType(rapid.IntRange(0, len(dtypes)-1).Draw(t, "type")),
				Shape: rapid.SliceOfN(rapid.IntRange(0, 5), 0, 3).Draw(t, "shape"),
			}
			tensors = append(tensors, tensor)
			total += tensor.Bytes()
		}
		data := rapid.SliceOfN(rapid.Byte(), int(total), int(total)).Draw(t, "data")
		meta := rapid.MapOf(rapid.String(), rapid.String()).Draw(t, "meta")
		r, err := open(write(t, meta, tensors, data, rapid.IntRange(1, 9).Draw(t, "piece")))
		if err != nil {
			t.Fatal(err)
		}
		if got := r.Metadata(); len(got)+len(meta) > 0 && !reflect.DeepEqual(got, meta) {
			t.Errorf("metadata are %q, want %q", got, meta)
		}
		if got := r.Tensors(); len(got) != len(tensors) {
			t.Errorf("%d tensors, want %d", len(got), len(tensors))
		}
		for _, want := range tensors {
			got, ok := r.Tensor(want.Name)
			if !ok || got.DType != want.DType || len(got.Shape) != len(want.Shape) {
				t.Fatalf("got %v, want %v", got, want)
			}
			p := make([]byte, want.Bytes())
			if err := r.ReadAt(want.Name, p, 0); err != nil || !bytes.Equal(p, data[:len(p)]) {
				t.Errorf("%q has %x, %v, want %x", want.Name, p, err, data[:len(p)])
			}
			data = data[len(p):]
		}
	})
}

func TestProgrammersErrors(t *testing.T) {
	one := NewLayout(nil, []Tensor{{"z", U8, []int{0}}, {"a", U8, []int{2}}, {"b", U8, []int{1}}})
	// writer has written the data of a and b that are given.
	writer := func(data ...string) *Writer {
		w, err := NewWriter(io.Discard, one)
		if err != nil {
			t.Fatal(err)
		}
		for i, d := range data {
			if err := w.Write([]string{"a", "b"}[i], []byte(d)); err != nil {
				t.Fatal(err)
			}
		}
		return w
	}
	r, err := open(write(t, nil, []Tensor{{"a", U8, []int{2}}, {"b", U8, []int{3}}}, []byte("xyxyz"), 2))
	if err != nil {
		t.Fatal(err)
	}
	for name, c := range map[string]struct {
		want string
		f    func()
	}{
		"wrong order":      {`tensor "b" is not the next one`, func() { _ = writer().Write("b", []byte("x")) }},
		"unknown name":     {`tensor "c" is not the next one`, func() { _ = writer().Write("c", nil) }},
		"nothing left":     {`tensor "c" is not the next one`, func() { w := writer("xx", "x"); _ = w.Write("c", nil) }},
		"too much":         {`3 bytes for tensor "a", which lacks 2`, func() { _ = writer().Write("a", []byte("xxx")) }},
		"too much behind":  {`2 bytes for tensor "b", which lacks 1`, func() { _ = writer("xx").Write("b", []byte("xx")) }},
		"too little":       {`tensor "a" lacks 1 bytes`, func() { writer("x").Close() }},
		"the last lacks":   {`tensor "b" lacks 1 bytes`, func() { writer("xx").Close() }},
		"back again":       {`tensor "a" is not the next one`, func() { w := writer("xx", ""); _ = w.Write("a", nil) }},
		"name twice":       {`"a" is empty, reserved`, func() { NewLayout(nil, []Tensor{{"a", U8, nil}, {"a", U8, nil}}) }},
		"reserved name":    {`"__metadata__" is empty, reserved`, func() { NewLayout(nil, []Tensor{{metadata, U8, nil}}) }},
		"no name":          {`"" is empty, reserved`, func() { NewLayout(nil, []Tensor{{"", U8, nil}}) }},
		"name not UTF-8":   {`"\xff" is empty, reserved`, func() { NewLayout(nil, []Tensor{{"\xff", U8, nil}}) }},
		"negative":         {"has no length", func() { NewLayout(nil, []Tensor{{"a", U8, []int{-1}}}) }},
		"no type":          {"DType(99) is no type", func() { NewLayout(nil, []Tensor{{"a", 99, nil}}) }},
		"next to a type":   {"DType(7) is no type", func() { NewLayout(nil, []Tensor{{"a", U64 + 1, nil}}) }},
		"no such tensor":   {`no tensor "c"`, func() { _ = r.ReadAt("c", nil, 0) }},
		"beyond its end":   {`2 bytes from 1 on are not in tensor "a" of 2 bytes`, func() { _ = r.ReadAt("a", make([]byte, 2), 1) }},
		"too many bytes":   {`4 bytes from 0 on are not in tensor "b" of 3 bytes`, func() { _ = r.ReadAt("b", make([]byte, 4), 0) }},
		"behind its end":   {`0 bytes from 4 on are not in tensor "b" of 3 bytes`, func() { _ = r.ReadAt("b", nil, 4) }},
		"far behind":       {"are not in tensor", func() { _ = r.ReadAt("b", nil, math.MaxInt64) }},
		"before its data":  {"0 bytes from -1 on", func() { _ = r.ReadAt("a", nil, -1) }},
		"before the first": {"0 bytes from -1 on", func() { _ = r.ReadAt("b", nil, -1) }},
	} {
		t.Run(name, func(t *testing.T) {
			defer func() {
				if got := fmt.Sprint(recover()); !strings.Contains(got, c.want) {
					t.Errorf("got the panic %q, want words with %q", got, c.want)
				}
			}()
			c.f()
		})
	}
}

// brokenReader gives some bytes and then an error.
type brokenReader struct {
	n   int
	err error
}

func (b brokenReader) ReadAt(p []byte, _ int64) (int, error) { return min(b.n, len(p)), b.err }

func TestReadFails(t *testing.T) {
	broken := errors.New("the disk is broken")
	for _, c := range []struct {
		r    io.ReaderAt
		want error
	}{
		{brokenReader{3, broken}, broken},
		{brokenReader{3, io.EOF}, io.ErrUnexpectedEOF},
		{brokenReader{3, nil}, io.ErrUnexpectedEOF},
	} {
		if _, err := NewReader(c.r, 100); err != c.want {
			t.Errorf("%+v: got %v, want %v", c.r, err, c.want)
		}
	}
}

// The largest length is a length.
func TestLargest(t *testing.T) {
	if n := (Tensor{"a", U8, []int{math.MaxInt64}}).Bytes(); n != math.MaxInt64 {
		t.Errorf("got %d bytes", n)
	}
	// A header of the largest length is read: it is missing here, not too long.
	length := binary.LittleEndian.AppendUint64(nil, maxHeader)
	if _, err := NewReader(bytes.NewReader(length), 1<<40); err != io.ErrUnexpectedEOF {
		t.Errorf("a header of the largest length: %v", err)
	}
}

// Whatever opens can be written again and read as the same.
func FuzzReader(f *testing.F) {
	f.Add(`{"a":{"dtype":"U8","shape":[2],"data_offsets":[0,2]}}`, "xy")
	f.Add(`{"__metadata__":{"format":"pt"},"b":{"dtype":"F32","shape":[],"data_offsets":[0,4]},"":{"dtype":"I64","shape":[0,1],"data_offsets":[0,0]}}  `, "wxyz")
	f.Fuzz(func(t *testing.T, header, data string) {
		r, err := open(raw(header, data))
		if err != nil {
			return
		}
		var all []byte
		for _, tensor := range r.Tensors() {
			p := make([]byte, tensor.Bytes())
			if err := r.ReadAt(tensor.Name, p, 0); err != nil {
				t.Fatalf("%v: %v", tensor, err)
			}
			if tensor.Name == "" {
				return // ours are never without a name
			}
			all = append(all, p...)
		}
		again, err := open(write(t, r.Metadata(), r.Tensors(), all, 5))
		if err != nil {
			t.Fatal(err)
		}
		if !reflect.DeepEqual(again.Tensors(), r.Tensors()) {
			t.Errorf("tensors were %v and are %v", r.Tensors(), again.Tensors())
		}
		for k, v := range r.Metadata() {
			if again.Metadata()[k] != v {
				t.Errorf("metadata were %q and are %q", r.Metadata(), again.Metadata())
			}
		}
	})
}
